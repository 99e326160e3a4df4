//! Connections that are made in another way than by TCP.

use std::fmt::Debug;
use std::io;
use std::pin::Pin;

use dcp_proto::topology::Address;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::{Error, ErrorKind};

/// A stream of bytes to a node and back.
pub trait Transport: AsyncRead + AsyncWrite + Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Debug + Send + Unpin> Transport for T {}

/// A connection on its way.
pub type Dialing = Pin<Box<dyn Future<Output = io::Result<Box<dyn Transport>>> + Send>>;

/// Makes the connections of a client in place of TCP: through a tunnel, or to a cluster in the same
/// process that is run in simulated time.
pub trait Dial: Debug + Send + Sync {
    /// Connects to a node, as the connection string or the cluster map names it.
    fn dial(&self, address: &Address) -> Dialing;

    /// Where a client gets its random numbers from: waits between attempts, names, nonces. `None`,
    /// the default, is the system; a number makes runs in simulated time alike, and nonces known
    /// to whoever knows it. Credentials are then asked for in place, since a clock that is
    /// simulated would go on while another thread is waited for.
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

/// Where random numbers come from. Not a generator of this thread: a forked child has a copy of it, and
/// would draw the same nonces and names as its siblings.
pub(crate) fn randomness(dialer: Option<&dyn Dial>) -> StdRng {
    match dialer.and_then(Dial::seed) {
        Some(seed) => StdRng::seed_from_u64(seed),
        None => StdRng::from_os_rng(),
    }
}
