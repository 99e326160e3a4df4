//! Bodies of responses: a whole document, or a stream of configurations.

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use dcp_wire::message::ConfigVersion;
use hyper::body::{Frame, SizeHint};
use tokio_util::sync::CancellationToken;

use super::documents::{self, Detail};
use crate::cluster::{Cluster, Follower as MapFollower, ServedBucket};

/// Separator after each configuration of a streaming response.
const SEPARATOR: &[u8] = b"\n\n\n\n";

/// The next configuration, and the source of the following ones.
type NextConfig = Pin<Box<dyn Future<Output = Option<(Bytes, Follower)>> + Send>>;

/// The body of an answer.
pub(super) enum Body {
    /// The whole body; `None` once it was taken.
    Whole(Option<Bytes>),
    /// Configurations, each as soon as it is available.
    Configs(NextConfig),
}

impl Body {
    pub(super) fn configs(follower: Follower) -> Self {
        Self::Configs(Box::pin(follower.next()))
    }
}

impl From<String> for Body {
    fn from(text: String) -> Self {
        Self::Whole(Some(text.into()))
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole(_) => "Whole",
            Self::Configs(_) => "Configs",
        })
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let data = match self.get_mut() {
            Self::Whole(whole) => whole.take(),
            Self::Configs(next) => match ready!(next.as_mut().poll(cx)) {
                Some((config, follower)) => {
                    *next = Box::pin(follower.next());
                    Some(config)
                }
                None => {
                    // A finished future must not be polled again.
                    *next = Box::pin(std::future::ready(None));
                    None
                }
            },
        };
        Poll::Ready(data.map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(Some(whole)) => {
                SizeHint::with_exact(u64::try_from(whole.len()).unwrap_or(u64::MAX))
            }
            Self::Whole(None) => SizeHint::with_exact(0),
            Self::Configs(_) => SizeHint::default(),
        }
    }
}

/// Follows the configuration of the bucket; a slow reader only gets the newest one.
#[derive(Debug)]
pub(super) struct Follower {
    cluster: Arc<Cluster>,
    served: Arc<ServedBucket>,
    node: usize,
    detail: Detail,
    version: MapFollower,
    /// Version that was sent last.
    sent: Option<ConfigVersion>,
    stop: CancellationToken,
}

impl Follower {
    pub(super) fn new(
        cluster: Arc<Cluster>,
        served: Arc<ServedBucket>,
        node: usize,
        detail: Detail,
        stop: CancellationToken,
    ) -> Self {
        let mut version = cluster.follow_map();
        // The current configuration is sent first.
        version.mark_unseen();
        Self { cluster, served, node, detail, version, sent: None, stop }
    }

    /// The next configuration with its separator; `None` once the bucket was dropped or the cluster
    /// stopped.
    async fn next(mut self) -> Option<(Bytes, Self)> {
        loop {
            self.stop.run_until_cancelled(self.version.changed()).await?;
            self.version.mark_seen();
            let version = Some(self.served.map().version);
            // Other buckets' maps may have changed.
            if self.sent < version {
                self.sent = version;
                break;
            }
        }
        let (cluster, served) = (&self.cluster, &self.served);
        let mut config = documents::bucket(cluster, served, self.node, self.detail)?.into_bytes();
        config.extend_from_slice(SEPARATOR);
        Some((config.into(), self))
    }
}
