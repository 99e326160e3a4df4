//! The first connection of a client, to the first seed that answers.

use std::time::Duration;

use dcp_proto::topology::Address;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use super::errors::{Stage, no_credentials};
use super::{Connected, Connector, resolve, share};
use crate::srv::{self, SrvError};
use crate::{Chain, Credentials, Error, ErrorKind};

/// The log target of everything about connecting.
const LOG: &str = "dcp_consumer::connect";

/// How long to wait for a seed before the next one is tried as well.
const NEXT_AFTER: Duration = Duration::from_millis(250);

impl Connector {
    /// Connects to the first node of the connection string that answers, without DCP.
    ///
    /// They are tried in order, and a slow one does not delay the next: the connect timeout applies
    /// to all of them together. If one node refuses the user, others are not tried.
    /// Cancellation-safe.
    ///
    /// # Errors
    /// [`Error`] of the only node, or one with the failures of all nodes.
    pub async fn connect_any(&self) -> Result<Connected, Error> {
        let limit = self.shared.options.connect_timeout;
        let deadline = Instant::now() + limit;
        let credentials = match timeout_at(deadline, self.credentials()).await {
            Ok(credentials) => credentials?,
            Err(_) => return Err(no_credentials(limit)),
        };
        let mut seeds = self.seeds(deadline).await?.into_iter();
        let mut attempts = JoinSet::new();
        let mut failed = Vec::new();
        loop {
            if let Some(address) = seeds.next() {
                let (connector, credentials) = (self.clone(), credentials.clone());
                attempts.spawn(async move {
                    let result = connector.try_seed(deadline, &address, credentials).await;
                    (address, result)
                });
            }
            match timeout(NEXT_AFTER, attempts.join_next()).await {
                Ok(Some(Ok((_, Ok(connected))))) => return Ok(connected),
                Ok(Some(Ok((address, Err(error))))) => {
                    if matches!(error.kind(), ErrorKind::Authentication | ErrorKind::Config) {
                        return Err(error);
                    }
                    tracing::debug!(
                        target: LOG, %address, error = %Chain(&error), "a node cannot be reached"
                    );
                    failed.push((address, error));
                }
                Ok(None) => return Err(none_can_be_used(failed)),
                // A panicked attempt counts as unanswered; otherwise it is time for the next seed.
                Ok(Some(Err(_))) | Err(_) => {}
            }
        }
    }

    async fn try_seed(
        &self,
        deadline: Instant,
        address: &Address,
        credentials: Option<Credentials>,
    ) -> Result<Connected, Error> {
        let limit = deadline.saturating_duration_since(Instant::now());
        let mut stage = Stage::Resolve;
        let config = self.bootstrap_config(address, credentials.as_ref());
        let attempt = Box::pin(self.attempt(limit, address, config, &mut stage));
        match timeout_at(deadline, attempt).await {
            Ok(result) => result,
            Err(_) => Err(stage.timed_out(address, self.shared.options.connect_timeout)),
        }
    }

    /// The nodes to try first: those in the connection string, or those that DNS lists for a single
    /// service name.
    async fn seeds(&self, deadline: Instant) -> Result<Vec<Address>, Error> {
        let written = self.shared.connection_string.addresses().to_vec();
        let (Some(service), [host]) = (self.shared.connection_string.srv_name(), &written[..])
        else {
            return Ok(written);
        };
        let wanted = self.shared.options.srv_targets;
        // At most half of the time: the rest is for connecting.
        let lookup = async {
            if resolve(host).await.is_ok() {
                return None;
            }
            Some(async { srv::lookup(&srv::resolver()?, service, wanted).await }.await)
        };
        match timeout(share(deadline, 2), lookup).await.ok().flatten() {
            Some(Ok(listed)) => return Ok(listed),
            Some(Err(error @ SrvError::Elsewhere { .. })) => {
                return Err(Error::new(ErrorKind::Connect, error.to_string()));
            }
            Some(Err(error)) => {
                tracing::debug!(target: LOG, service, error = %Chain(&error), "DNS lists no nodes");
            }
            None => {}
        }
        Ok(written)
    }
}

/// No seed can be used. The error has the kind of a temporary one, if there is any: the others may
/// come from nodes that no longer belong to the cluster.
fn none_can_be_used(mut failed: Vec<(Address, Error)>) -> Error {
    if failed.len() <= 1 {
        let none = || Error::new(ErrorKind::Config, "the connection string names no host");
        return failed.pop().map_or_else(none, |(_, error)| error);
    }
    let said = |(address, error): &(Address, Error)| {
        let (node, text) = (address.to_string(), Chain(error).to_string());
        if text.contains(&node) { text } else { format!("{node}: {text}") }
    };
    let said: Vec<_> = failed.iter().map(said).collect();
    let message = format!("none of {} hosts can be used: {}", failed.len(), said.join("; "));
    let passes = failed.iter().position(|(_, error)| error.is_retryable());
    let (_, error) = failed.swap_remove(passes.unwrap_or(failed.len() - 1));
    error.with_message(message)
}
