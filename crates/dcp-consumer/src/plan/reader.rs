//! Running a plan elsewhere.

use dcp_proto::BatchSink;
use dcp_proto::plan::ReadPlan;
use tokio::time::Instant;

use super::PlannerError;
use super::planner::pause;
use crate::config::YEARS;
use crate::{ChangeStream, Client, ConnectOptions, StreamOptions};

/// Connects and [runs](Client::run) a plan, with retries for as long as its retry timeout allows,
/// since its planner had opened the bucket.
///
/// Uses the client `kept` from an earlier read if it works, and returns the one that the stream
/// belongs to.
///
/// # Errors
/// [`PlannerError`];
/// [`CheckpointError::OtherBucket`](crate::CheckpointError::OtherBucket) if the bucket is not the
/// one the read was planned for.
pub async fn open<S, M>(
    connect: &ConnectOptions,
    mut kept: Option<Client>,
    plan: &ReadPlan,
    options: &StreamOptions,
    sinks: impl Fn(&Client) -> M,
) -> Result<(Client, ChangeStream<S::Batch>), PlannerError>
where
    S: BatchSink,
    M: Fn() -> S + Send + Sync + 'static,
{
    let deadline = Instant::now() + plan.retry_timeout.min(YEARS);
    let mut attempts = 0;
    loop {
        let was_kept = kept.is_some();
        let attempt = async {
            let client = match kept.take() {
                Some(client) => client,
                None => Client::connect(connect.clone()).await?,
            };
            plan.check(client.bucket_uuid())?;
            let stream = client.run(plan, options, sinks(&client)).await?;
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
                tracing::warn!(name: "plan_retried", %error, "a plan cannot be run, trying again");
                tokio::time::sleep(pause).await;
                attempts += 1;
            }
            outcome => return outcome,
        }
    }
}
