//! Connections over other transports than TCP.

use std::fmt::Debug;
use std::io;
use std::pin::Pin;

use dcp_proto::topology::Address;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::{Error, ErrorKind};

/// A byte stream to a node.
pub trait Transport: AsyncRead + AsyncWrite + Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Debug + Send + Unpin> Transport for T {}

/// A connection attempt.
pub type Dialing = Pin<Box<dyn Future<Output = io::Result<Box<dyn Transport>>> + Send>>;

/// Makes the connections of a client instead of TCP: through a tunnel, or to a cluster in the same
/// process that runs in simulated time.
pub trait Dial: Debug + Send + Sync {
    /// Connects to a node, by its address in the connection string or the cluster map.
    fn dial(&self, address: &Address) -> Dialing;

    /// Seed of a client's random numbers: waits between attempts, names, nonces. `None`, the
    /// default, uses the system's randomness; a seed makes runs in simulated time reproducible, but
    /// determines the nonces. Credentials are then requested in place, since a simulated clock
    /// would advance while waiting for another thread.
    fn seed(&self) -> Option<u64> {
        None
    }
}

/// Connects to a node.
pub(crate) async fn dial(
    dialer: &dyn Dial,
    address: &Address,
) -> Result<Box<dyn Transport>, Error> {
    dialer.dial(address).await.map_err(|error| {
        let message = format!("the dialer could not connect to {address}");
        Error::new(ErrorKind::Connect, message).with_source(error)
    })
}

/// Source of random numbers. Not a thread-local generator: forked children copy it, and would draw
/// the same nonces and names.
pub(crate) fn randomness(dialer: Option<&dyn Dial>) -> StdRng {
    match dialer.and_then(Dial::seed) {
        Some(seed) => StdRng::seed_from_u64(seed),
        None => StdRng::from_os_rng(),
    }
}
