//! Reading one partition.

use dcp_proto::BatchSink;
use dcp_proto::micro_batch::Partition;
use tokio::time::Instant;

use super::PlannerError;
use super::planner::pause;
use crate::config::YEARS;
use crate::{ChangeStream, Client, ConnectOptions, End, Filter, OnRollback, Start, StreamOptions};

/// The options of a partition's stream: the contents of rows from `base`, the range from the plan.
#[must_use]
pub fn stream_options(partition: &Partition, base: StreamOptions) -> StreamOptions {
    let (start, ends) = partition.to_stream();
    let filter = start.filter().cloned().unwrap_or_default();
    let persisted_only = partition.is_followed && partition.persisted_only;
    let on_rollback = if partition.is_followed { OnRollback::Fail } else { partition.on_rollback };
    StreamOptions {
        start: Start::Checkpoint(start),
        filter: Filter::Ids(filter.documents().clone(), filter.patterns().clone()),
        rows: filter.rows().clone(),
        system_documents: filter.system_documents(),
        vbuckets: Some(ends.keys().copied().collect()),
        end: End::At(ends),
        end_exists: true,
        clamp: partition.is_followed,
        persisted_only,
        end_persisted: persisted_only,
        on_rollback,
        ignore_purged_tombstones: partition.past_purge,
        retry_timeout: partition.patience,
        ..base
    }
}

/// Opens the stream of a partition that has something to read, with retries for as long as its
/// patience allows, since its planner had opened the bucket.
///
/// Uses the client `kept` from an earlier read if it works, and returns the one that the stream
/// belongs to.
///
/// # Errors
/// [`PlannerError`];
/// [`OffsetsError::OtherBucket`](dcp_proto::micro_batch::OffsetsError::OtherBucket) if the bucket
/// is not the one the read was planned for.
pub async fn open<S, M>(
    connect: &ConnectOptions,
    mut kept: Option<Client>,
    partition: &Partition,
    base: &StreamOptions,
    sinks: impl Fn(&Client) -> M,
) -> Result<(Client, ChangeStream<S::Batch>), PlannerError>
where
    S: BatchSink,
    M: Fn() -> S + Send + Sync + 'static,
{
    let options = stream_options(partition, base.clone());
    let deadline = Instant::now() + partition.patience.min(YEARS);
    let mut attempts = 0;
    loop {
        let was_kept = kept.is_some();
        let attempt = async {
            let client = match kept.take() {
                Some(client) => client,
                None => Client::connect(connect.clone()).await?,
            };
            partition.check(client.bucket_uuid())?;
            let stream = client.stream(options.clone(), sinks(&client)).await?;
            Ok::<_, PlannerError>((client, stream))
        };
        match Box::pin(attempt).await {
            // A new client decides: the node of this one may be gone, or its bucket recreated.
            Err(error) if was_kept => tracing::debug!(%error, "a pooled client cannot be used"),
            Err(error) if error.may_pass(true) => {
                let pause = pause(connect, attempts);
                if Instant::now() + pause >= deadline {
                    return Err(error);
                }
                tracing::warn!(%error, "a partition cannot be opened, trying again");
                tokio::time::sleep(pause).await;
                attempts += 1;
            }
            outcome => return outcome,
        }
    }
}
