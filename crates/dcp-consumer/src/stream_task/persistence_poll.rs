//! The task that polls one node for the persisted seqnos of its copies.

use std::sync::Arc;
use std::time::Duration;

use dcp_proto::consumer::{Failure, Reaction, Step};
use dcp_proto::topology::Address;
use dcp_wire::{Vbid, Vbuuid};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::persistence_watch::{Branches, Polled};
use crate::bucket::Bucket;
use crate::connection::NodeConnection;
use crate::observe::{Answer, observed_seqnos, to_answer};
use crate::{Error, ErrorKind};

/// How long a node may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Makes `requests` and passes their results to `report`, until their sender is dropped. Uses a
/// separate connection, so that answers arrive while the flow-control buffer of the others is full.
pub(super) async fn poll_persisted(
    bucket: Arc<Bucket>,
    address: Address,
    mut requests: mpsc::UnboundedReceiver<Branches>,
    report: impl Fn(Polled),
) {
    let mut connection = None;
    while let Some(branches) = requests.recv().await {
        let asked = timeout(TIMEOUT, ask(&bucket, &address, &mut connection, &branches)).await;
        let polled = asked.unwrap_or_else(|_| {
            let message = "a node did not report its persisted seqnos in time";
            Polled::Lost(Error::new(ErrorKind::Timeout, message))
        });
        if !matches!(polled, Polled::Answers { .. }) {
            connection = None;
        }
        report(polled);
    }
    if let Some(connection) = connection {
        bucket.put_into_pool(connection, None);
    }
}

async fn ask(
    bucket: &Bucket,
    address: &Address,
    connection: &mut Option<NodeConnection>,
    branches: &[(Vbid, Vbuuid)],
) -> Polled {
    let connection = match connection {
        Some(connection) => connection,
        None => match Box::pin(bucket.connect_to(address, None, TIMEOUT)).await {
            Ok(made) => connection.insert(made),
            Err(error) => return Polled::Lost(error),
        },
    };
    let answers = bucket.ask(connection, |machine| machine.request_observed_seqnos(branches));
    let observed = match answers.await {
        Ok(answers) => observed_seqnos(answers),
        Err(error) => return failure(error),
    };
    let answer = |&(vbid, _): &(Vbid, _)| observed.get(&vbid).map(to_answer);
    let answers: Vec<(Vbid, Answer)> =
        branches.iter().map(|branch| (branch.0, answer(branch))).collect();
    let is_map_old = answers.iter().any(|(_, answer)| answer.is_none());
    Polled::Answers { answers, is_map_old }
}

/// Whether a retry can help.
fn failure(error: Error) -> Polled {
    let reaction = error.status().map(|status| Reaction::to(Step::ObserveSeqno, status));
    let Some(Reaction::RetryOnceGranted(failure)) = reaction else { return Polled::Lost(error) };
    let message = match failure {
        Failure::AccessDenied => {
            "the user may not observe persisted seqnos, which reading only persisted changes needs: \
             grant the role 'Data DCP Reader' (data_dcp_reader)"
        }
        _ => "the server does not support OBSERVE_SEQNO: read unpersisted changes as well",
    };
    Polled::Refused(Error::new(failure.into(), message).with_source(error))
}
