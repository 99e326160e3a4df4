//! Servers that do not count prepared and aborted writes in the high seqnos that they report.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use dcp_consumer::plan::{Planner, open};
use dcp_consumer::{Client, ConnectOptions, Dial, Dialing, End, Start, StreamOptions, Transport};
use dcp_producer::Producer;
use dcp_proto::plan::Limits;
use dcp_proto::topology::Address;
use dcp_test::with;
use dcp_wire::{Opcode, Seqno, Vbid};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, duplex, split};
use tokio::net::TcpStream;

use crate::embedded::{options, producer, read_all, reader, write};
use crate::rows::Rows;

/// The last seqnos of a vBucket, reported as if they belonged to aborted writes.
const HIDDEN: u64 = 2;

/// Reports lower high seqnos.
#[derive(Debug)]
struct Hiding;

impl Dial for Hiding {
    fn dial(&self, address: &Address) -> Dialing {
        let node = address.to_string();
        Box::pin(async move {
            let (from_server, mut to_server) = split(TcpStream::connect(&node).await?);
            let (near, far) = duplex(1 << 16);
            let (mut from_client, to_client) = split(far);
            tokio::spawn(async move {
                let _ = copy(&mut from_client, &mut to_server).await;
                let _ = to_server.shutdown().await;
            });
            tokio::spawn(lower_seqnos(from_server, to_client));
            Ok(Box::new(near) as Box<dyn Transport>)
        })
    }
}

async fn lower_seqnos(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    loop {
        let mut packet = vec![0; 24];
        from.read_exact(&mut packet).await?;
        let body = u32::from_be_bytes(packet[8..12].try_into().unwrap());
        packet.resize(24 + body as usize, 0);
        from.read_exact(&mut packet[24..]).await?;
        if packet[..2] == [0x81, Opcode::GET_ALL_VB_SEQNOS.0] {
            for entry in packet[24..].chunks_exact_mut(10) {
                let seqno = u64::from_be_bytes(entry[2..].try_into().unwrap());
                entry[2..].copy_from_slice(&seqno.saturating_sub(HIDDEN).to_be_bytes());
            }
        }
        to.write_all(&packet).await?;
    }
}

async fn connect(producer: &Producer) -> Client {
    let options = ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(reader())
        .with_dialer(Arc::new(Hiding));
    Client::connect(options).await.unwrap()
}

#[tokio::test]
async fn batch_ends_at_a_seqno_that_its_tasks_are_given() {
    let producer = producer(1, 1).await;
    write(&producer, 0..10);
    producer.persist();
    let client = connect(&producer).await;
    let observed = client.observer().unwrap().observe(&BTreeSet::from([Vbid(0)]), true).await;
    let observed = &observed.unwrap()[&Vbid(0)];
    assert_eq!((observed.high_seqno, observed.reported_seqno), (Seqno(10), Seqno(8)));

    let mut planner = Planner::new(&client, StreamOptions::default()).await.unwrap();
    let limits = with(Limits::default(), |o| o.persisted_only = true);
    let start = planner.earliest().into();
    let end = planner.end(&start, &limits).await.unwrap();
    assert_eq!(end.get(Vbid(0)).seqno, Seqno(8));
    let partitions = planner.partitions(&start, &end, None, &limits).await.unwrap();
    let [partition] = &partitions[..] else { panic!("{partitions:?}") };
    let base = options(Start::Earliest, End::Never);
    let connect = client.connect_options();
    let sinks = |_: &Client| Rows::default;
    let (_, mut stream) = open(connect, None, partition, &base, sinks).await.unwrap();
    assert_eq!(read_all(&mut stream).await.len(), 8);
}

#[tokio::test]
async fn checkpoint_above_the_reported_seqno_is_not_ahead_of_the_server() {
    let producer = producer(1, 1).await;
    write(&producer, 0..10);
    let client = connect(&producer).await;
    let opened = client.stream(options(Start::Earliest, End::Now), Rows::default).await;
    let mut stream = opened.unwrap();
    assert_eq!(read_all(&mut stream).await.len(), 10, "to the end of the snapshot");
    let start = Start::Checkpoint(stream.checkpoint());
    let opened = client.stream(options(start, End::Now), Rows::default).await;
    let mut stream = opened.expect("the checkpoint is refused");
    assert_eq!(read_all(&mut stream).await.len(), 0);
}
