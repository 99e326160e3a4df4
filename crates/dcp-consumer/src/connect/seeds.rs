//! The first connection of a client, to the first seed that answers.

use std::pin::pin;
use std::time::Duration;

use dcp_proto::topology::Address;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::errors::{Stage, no_credentials};
use super::{Connected, Connector, resolve, share};
use crate::credentials::Secret;
use crate::failure_log::{FailureLog, LOG};
use crate::retry::Backoff;
use crate::srv::{self, Resolvers, SrvError};
use crate::{Chain, Error, ErrorKind};

/// How long to wait for a seed before the next one is tried as well.
const NEXT_AFTER: Duration = Duration::from_millis(250);

/// Longest pause before a node is tried again that is starting or busy.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How long to wait for the SRV records of a name that has an address.
const HOST_TIMEOUT: Duration = Duration::from_millis(500);

impl Connector {
    /// Connects to the first node of the connection string that answers, without DCP.
    ///
    /// They are tried in order, and a slow one does not delay the next: the connect timeout applies
    /// to all of them together. If one node refuses the user, others are not tried. A node that
    /// answers that it is starting or busy is tried again until then. Cancellation-safe.
    ///
    /// # Errors
    /// [`Error`] of the only node, or one with the failures of all nodes.
    pub async fn connect_any(&self) -> Result<Connected, Error> {
        self.any(true).await
    }

    /// The same for a client that has connected before and waits by itself: what fails is neither
    /// tried again nor logged as a warning.
    pub(crate) async fn connect_any_again(&self) -> Result<Connected, Error> {
        self.any(false).await
    }

    async fn any(&self, is_first: bool) -> Result<Connected, Error> {
        let limit = self.shared.options.connect_timeout;
        let deadline = Instant::now() + limit;
        let secret = match timeout_at(deadline, self.secret()).await {
            Ok(secret) => secret?,
            Err(_) => return Err(no_credentials(limit)),
        };
        let mut seeds = self.seeds(deadline).await?.into_iter();
        let mut attempts = JoinSet::new();
        let (mut failed, mut failures) = (Vec::new(), FailureLog::default());
        loop {
            if let Some(address) = seeds.next() {
                let (connector, secret) = (self.clone(), secret.clone());
                attempts.spawn(async move {
                    let tried = match is_first {
                        true => connector.wait_for_seed(deadline, &address, secret).await,
                        false => connector.try_seed(deadline, &address, secret).await,
                    };
                    (address, tried)
                });
            }
            match timeout(NEXT_AFTER, attempts.join_next()).await {
                Ok(Some(Ok((_, Ok(connected))))) => return Ok(connected),
                Ok(Some(Ok((address, Err(error))))) => {
                    if matches!(error.kind(), ErrorKind::Authentication | ErrorKind::Config) {
                        return Err(error);
                    }
                    // The call returns the failure of the last node.
                    let is_last = attempts.is_empty() && seeds.len() == 0;
                    if is_first && !is_last {
                        failures.failed(&address, &error);
                    } else {
                        let error = Chain(&error);
                        tracing::debug!(target: LOG, node = %address, %error, "a node cannot be reached");
                    }
                    failed.push((address, error));
                }
                Ok(None) => return Err(none_can_be_used(failed)),
                // A panicked attempt counts as unanswered; otherwise it is time for the next seed.
                Ok(Some(Err(_))) | Err(_) => {}
            }
        }
    }

    /// Tries a seed, again if it answers that it is starting or busy.
    async fn wait_for_seed(
        &self,
        deadline: Instant,
        address: &Address,
        secret: Option<Secret>,
    ) -> Result<Connected, Error> {
        let (mut attempts, mut failures) = (0, FailureLog::default());
        let mut randomness = self.randomness();
        let mut answer = None;
        loop {
            let error = match self.try_seed(deadline, address, secret.clone()).await {
                Err(error) if error.is_retryable() && error.status().is_some() => error,
                // What the node has answered says more than that time is up.
                Err(error) if error.kind() == ErrorKind::Timeout => {
                    return Err(answer.unwrap_or(error));
                }
                tried => return tried,
            };
            failures.failed(address, &error);
            let pause = Backoff::SHORT.wait(attempts, &mut randomness).min(LONGEST_PAUSE);
            if Instant::now() + pause >= deadline {
                return Err(error);
            }
            answer = Some(error);
            attempts = attempts.saturating_add(1);
            sleep(pause).await;
        }
    }

    async fn try_seed(
        &self,
        deadline: Instant,
        address: &Address,
        secret: Option<Secret>,
    ) -> Result<Connected, Error> {
        let limit = deadline.saturating_duration_since(Instant::now());
        let mut stage = Stage::Resolve;
        let config = self.bootstrap_config(address, secret.as_ref());
        let attempt = Box::pin(self.attempt(limit, address, config, secret, &mut stage));
        match timeout_at(deadline, attempt).await {
            Ok(result) => result,
            Err(_) => Err(stage.timed_out(address, self.shared.options.connect_timeout)),
        }
    }

    /// The nodes to try first: those that DNS lists for a single service name, or those in the
    /// connection string.
    async fn seeds(&self, deadline: Instant) -> Result<Vec<Address>, Error> {
        let written = self.shared.connection_string.addresses().to_vec();
        let (Some(service), [host]) = (self.shared.connection_string.srv_name(), &written[..])
        else {
            return Ok(written);
        };
        let wanted = self.shared.options.srv_targets;
        let lookup = async { srv::lookup(&Resolvers::of_system()?, service, wanted).await };
        let has_address = async { resolve(host).await.is_ok() };
        // At most half of the time: the rest is for connecting.
        let listed = listed(service, lookup, has_address, share(deadline, 2)).await?;
        Ok(listed.unwrap_or(written))
    }
}

/// The nodes that DNS lists for a service; `None` if it lists none in time.
///
/// SRV records come first, as in every SDK: the name of a service within Kubernetes has the
/// addresses of its nodes too, by which they do not know themselves. But a host with an address is
/// most often just a host, whose name server may not even answer other questions.
async fn listed(
    service: &str,
    lookup: impl Future<Output = Result<Vec<Address>, SrvError>>,
    has_address: impl Future<Output = bool>,
    limit: Duration,
) -> Result<Option<Vec<Address>>, Error> {
    let deadline = Instant::now() + limit;
    let mut has_address = pin!(async { timeout_at(deadline, has_address).await.unwrap_or(false) });
    let mut lookup = pin!(timeout_at(deadline, lookup));
    let (listed, is_host) = tokio::select! {
        biased;
        listed = &mut lookup => (listed, None),
        is_host = &mut has_address => match is_host {
            true => (timeout(HOST_TIMEOUT, lookup).await.and_then(|listed| listed), Some(true)),
            false => (lookup.await, Some(false)),
        },
    };
    match listed {
        Ok(Ok(listed)) => Ok(Some(listed)),
        Ok(Err(error @ SrvError::Elsewhere { .. })) => {
            let is_host = match is_host {
                Some(is_host) => is_host,
                None => has_address.await,
            };
            if is_host {
                tracing::warn!(name: "srv_unused", target: LOG, service, %error, "SRV records are not used");
                return Ok(None);
            }
            Err(Error::new(ErrorKind::Connect, error.to_string()))
        }
        Ok(Err(error)) => {
            tracing::debug!(target: LOG, service, error = %Chain(&error), "DNS lists no nodes");
            Ok(None)
        }
        Err(_) => {
            tracing::debug!(target: LOG, service, "DNS lists no nodes in time");
            Ok(None)
        }
    }
}

/// No seed can be used. The error has the kind of a temporary one, if there is any: the others may
/// come from nodes that no longer belong to the cluster.
fn none_can_be_used(mut failed: Vec<(Address, Error)>) -> Error {
    if failed.len() <= 1 {
        let none = || Error::option(&["connection_string"], "names no host");
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

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    async fn after<T>(wait: Duration, value: T) -> T {
        sleep(wait).await;
        value
    }

    fn nodes() -> Vec<Address> {
        vec![Address::new("n1.example.com", 11210)]
    }

    fn elsewhere() -> SrvError {
        SrvError::Elsewhere { service: "s".to_owned(), targets: vec!["evil.org:11210".to_owned()] }
    }

    #[tokio::test(start_paused = true)]
    async fn srv_records_come_before_the_addresses_of_the_name() {
        let soon = Duration::from_millis(100);
        for (lookup, has_address) in [(soon, Duration::ZERO), (Duration::ZERO, soon)] {
            for is_host in [true, false] {
                let lookup = after(lookup, Ok(nodes()));
                let listed = listed("s", lookup, after(has_address, is_host), LIMIT).await;
                assert_eq!(listed.unwrap(), Some(nodes()), "{is_host}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn name_server_that_does_not_answer_delays_a_host_by_half_a_second() {
        for (is_host, waits) in [(true, HOST_TIMEOUT), (false, LIMIT)] {
            let begun = Instant::now();
            let listed = listed("s", pending(), ready(is_host), LIMIT).await;
            assert_eq!((listed.unwrap(), begun.elapsed()), (None, waits), "{is_host}");
        }
        let begun = Instant::now();
        assert_eq!(listed("s", pending(), pending(), LIMIT).await.unwrap(), None);
        assert_eq!(begun.elapsed(), LIMIT, "whatever does not answer");
    }

    #[tokio::test(start_paused = true)]
    async fn host_is_used_by_its_address_if_its_srv_records_are_none_or_lead_away() {
        for is_host in [true, false] {
            let none = listed("s", ready(Err(SrvError::Empty)), ready(is_host), LIMIT).await;
            assert_eq!(none.unwrap(), None);
        }
        assert_eq!(listed("s", ready(Err(elsewhere())), ready(true), LIMIT).await.unwrap(), None);
        let error = listed("s", ready(Err(elsewhere())), ready(false), LIMIT).await.unwrap_err();
        assert!(error.to_string().contains("evil.org"), "{error}");
    }
}
