//! Servers that send without end what flow control does not count.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dcp_consumer::{Client, ConnectOptions, Credentials, Dial, Dialing, End, Start, Transport};
use dcp_proto::topology::Address;
use dcp_test::packet::encoded;
use dcp_test::peer::Peer;
use dcp_wire::{Frame, Header, Opcode};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::embedded::{ANSWER_TIMEOUT, options, producer};
use crate::rows::Rows;

/// Bytes that a connection holds on their way, in each direction.
const ON_THEIR_WAY: usize = 64 * 1024;

/// Lets connections begin with a server, and floods them once a stream is open, when nobody reads
/// any more what the client sends.
#[derive(Debug)]
struct Flood {
    packets: Vec<u8>,
    /// Bytes of the flood that the client took.
    taken: Arc<AtomicUsize>,
}

impl Dial for Flood {
    fn dial(&self, address: &Address) -> Dialing {
        let node = (address.host.clone(), address.port);
        let (packets, taken) = (self.packets.clone(), Arc::clone(&self.taken));
        Box::pin(async move {
            let server = TcpStream::connect((node.0.as_str(), node.1)).await?;
            let (client, far) = duplex(ON_THEIR_WAY);
            tokio::spawn(carry(server, far, packets, taken));
            Ok(Box::new(client) as Box<dyn Transport>)
        })
    }
}

/// Carries packets until a stream is open, then floods the client.
async fn carry(
    server: TcpStream,
    mut client: DuplexStream,
    packets: Vec<u8>,
    taken: Arc<AtomicUsize>,
) -> io::Result<()> {
    let (mut there, mut server, mut is_open) = (vec![0; ON_THEIR_WAY], Peer::new(server), false);
    while !is_open {
        tokio::select! {
            len = client.read(&mut there) => match len? {
                0 => return Ok(()),
                len => server.io.write_all(&there[..len]).await?,
            },
            packet = server.next() => {
                let Some(packet) = packet else { return Ok(()) };
                let Header { magic, opcode, .. } = packet.frame().header;
                is_open = magic.is_response() && opcode == Opcode::DCP_STREAM_REQ;
                client.write_all(packet.bytes()).await?;
            }
        }
    }
    loop {
        for chunk in packets.chunks(ON_THEIR_WAY) {
            client.write_all(chunk).await?;
            taken.fetch_add(chunk.len(), Ordering::Relaxed);
        }
    }
}

#[tokio::test]
async fn server_that_reads_no_answers_to_its_noops_has_to_wait() {
    let noops = encoded(&Frame::request(Opcode::DCP_NOOP)).repeat(4096);
    let producer = producer(1, 1).await;
    let taken = Arc::<AtomicUsize>::default();
    let mut connect = ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(Credentials::new("Administrator", "password"));
    connect.dialer = Some(Arc::new(Flood { packets: noops, taken: Arc::clone(&taken) }));
    let client = Client::connect(connect).await.unwrap();
    let _stream = client.stream(options(Start::Earliest, End::Never), Rows::default).await.unwrap();
    let mut before = 0;
    let standstill = async {
        loop {
            sleep(Duration::from_millis(300)).await;
            let now = taken.swap(0, Ordering::Relaxed);
            before += now;
            assert!(before < 16 << 20, "{before} bytes of noops were taken, and answers kept");
            if now == 0 && before > 0 {
                return before;
            }
        }
    };
    let all = timeout(ANSWER_TIMEOUT, standstill).await.expect("it goes on and on");
    // As many answers as noops, which are as long: at most what may wait to be written and what
    // had been read before.
    assert!(all < 8 << 20, "{all}");
}
