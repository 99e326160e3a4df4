//! The task that observes the persisted seqnos of one node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use dcp_proto::consumer::Event;
use dcp_proto::topology::Address;
use dcp_wire::message::ObservedSeqno;
use dcp_wire::{Status, Vbid, Vbuuid};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{Answer, Question, to_answer};
use crate::bucket::Bucket;
use crate::connection::NodeConnection;
use crate::{Error, ErrorKind};

/// How long a node may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Result of a request.
#[derive(Debug)]
pub(crate) enum Observed {
    /// Of the copies.
    Answers { answers: Vec<(Vbid, Answer)>, is_map_old: bool },
    /// The node could not be reached; a retry may help.
    Lost(Error),
    /// The node refuses such requests.
    Refused(Error),
}

/// Answers `questions` through `report` until their sender is dropped. Uses a separate connection,
/// so that answers arrive while the flow-control buffer of the others is full.
pub(crate) async fn observe(
    bucket: Arc<Bucket>,
    address: Address,
    mut questions: mpsc::UnboundedReceiver<Question>,
    report: impl Fn(Observed),
) {
    let mut connection = None;
    while let Some(question) = questions.recv().await {
        let asked = timeout(PATIENCE, ask(&bucket, &address, &mut connection, &question)).await;
        let observed = asked.unwrap_or_else(|_| {
            let message = "a node did not report its persisted seqnos in time";
            Observed::Lost(Error::new(ErrorKind::Timeout, message))
        });
        if !matches!(observed, Observed::Answers { .. }) {
            connection = None;
        }
        report(observed);
    }
    if let Some(connection) = connection {
        bucket.put_into_pool(connection, None);
    }
}

async fn ask(
    bucket: &Bucket,
    address: &Address,
    connection: &mut Option<NodeConnection>,
    question: &[(Vbid, Vbuuid)],
) -> Observed {
    let connection = match connection {
        Some(connection) => connection,
        None => match Box::pin(bucket.connect_to(address, None, PATIENCE)).await {
            Ok(made) => connection.insert(made),
            Err(error) => return Observed::Lost(error),
        },
    };
    let asked = bucket.ask(connection, |machine| machine.request_observed_seqnos(question));
    let observed = match asked.await {
        Ok(answers) => observed_seqnos(answers),
        Err(error) => return failure(error),
    };
    let answer = |&(vbid, _): &(Vbid, _)| observed.get(&vbid).map(to_answer);
    let answers: Vec<(Vbid, Answer)> =
        question.iter().map(|asked| (asked.0, answer(asked))).collect();
    let is_map_old = answers.iter().any(|(_, answer)| answer.is_none());
    Observed::Answers { answers, is_map_old }
}

/// The observed seqnos among answers.
pub(crate) fn observed_seqnos(answers: Vec<Event>) -> BTreeMap<Vbid, ObservedSeqno> {
    let observed = answers.into_iter().filter_map(|answer| match answer {
        Event::ObservedSeqno(observed) => Some((observed.vbid, observed)),
        _ => None,
    });
    observed.collect()
}

/// Whether a retry can help.
fn failure(error: Error) -> Observed {
    let (kind, message) = match error.status() {
        Some(Status::EACCESS) => (
            ErrorKind::AccessDenied,
            "the user may not observe persisted seqnos, which persisted_only needs: grant the role \
             'Data DCP Reader' (data_dcp_reader)",
        ),
        Some(Status::UNKNOWN_COMMAND | Status::NOT_SUPPORTED) => (
            ErrorKind::Unsupported,
            "the server does not support OBSERVE_SEQNO: stream without persisted_only",
        ),
        _ => return Observed::Lost(error),
    };
    Observed::Refused(Error::new(kind, message).with_source(error))
}
