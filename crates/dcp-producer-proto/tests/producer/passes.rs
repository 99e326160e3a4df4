//! Priorities and the order of backfills: what is written in one pass, and of which vBucket.

use bytes::{Bytes, BytesMut};
use dcp_producer_proto::Item;
use dcp_test::bucket::{Bucket, VBucket, doc};
use dcp_wire::message::{OpenFlags, StreamRequest};
use dcp_wire::{Opcode, Status, Vbid};

use crate::client::{Client, LEGACY, frame, from_scratch, packets};

/// Documents of a vBucket, so that a pass of high priority ends in the second one.
const DOCUMENTS: u64 = 40;

/// A document whose message has as many bytes as one of 256 B with a key of 19.
fn document(seqno: u64) -> Item {
    Item { value: Bytes::from(vec![b'x'; 256]), ..doc(seqno, 0) }
}

fn on_disk() -> VBucket {
    VBucket::new().on_disk((1..=DOCUMENTS).map(document))
}

fn in_memory() -> VBucket {
    VBucket::new().checkpoint(1, (1..=DOCUMENTS).map(document))
}

/// A client of vBuckets that it streams from the beginning, with these settings.
fn streaming(vbuckets: Vec<VBucket>, controls: &[(&str, &str)]) -> Client {
    let mut bucket = Bucket::with(VBucket::new());
    bucket.vbuckets = (0..).zip(vbuckets).collect();
    let vbids: Vec<u16> = bucket.vbuckets.keys().copied().collect();
    let mut client = Client::open_with(bucket, LEGACY, OpenFlags::PRODUCER, controls);
    for vbid in vbids {
        let request = StreamRequest { vbid: Vbid(vbid), ..from_scratch() };
        assert_eq!(client.request(&request), Status::SUCCESS);
    }
    client
}

/// What each pass writes, until there is nothing more.
fn passes(client: &mut Client) -> Vec<Vec<u8>> {
    let mut passes = Vec::new();
    for _ in 0..1000 {
        let mut out = BytesMut::new();
        let now = client.now;
        let sent = client.connection.poll_transmit(now, &client.bucket, &mut out, usize::MAX);
        assert_eq!(sent.written, out.len());
        passes.push(out.to_vec());
        if !sent.more {
            return passes;
        }
    }
    panic!("it always has more to send");
}

/// The vBuckets of the documents in their order, each named once for consecutive ones.
fn order(passes: &[Vec<u8>]) -> Vec<u16> {
    let packets: Vec<_> = passes.iter().flat_map(|pass| packets(pass)).collect();
    let headers = packets.iter().map(|packet| frame(packet).header);
    let documents = headers.filter(|header| header.opcode == Opcode::DCP_MUTATION);
    let mut order: Vec<_> = documents.map(|header| header.vbid().0).collect();
    assert!(!order.is_empty());
    order.dedup();
    order
}

#[test]
fn ct_09_a_priority_decides_how_many_messages_a_pass_has() {
    for (priority, messages) in [("low", 1), ("medium", 5), ("high", 50)] {
        let mut client = streaming(vec![on_disk(), in_memory()], &[("set_priority", priority)]);
        let passes = passes(&mut client);
        let (last, full) = passes.split_last().expect("a pass");
        assert!(!full.is_empty());
        for pass in full {
            assert_eq!(packets(pass).len(), messages, "{priority}");
        }
        assert!(packets(last).len() <= messages, "{priority}");
        let all: usize = passes.iter().map(|pass| packets(pass).len()).sum();
        assert_eq!(all as u64, 2 * (1 + DOCUMENTS), "nothing is lost at {priority}");
        assert_eq!(client.connection.write_limit(), Some(16 * 1024));
    }
}

#[test]
fn ct_09_a_priority_applies_from_the_next_pass_on() {
    let mut client = streaming(vec![on_disk()], &[]);
    assert_eq!(client.connection.write_limit(), None, "no client has to ask");
    let pass = |client: &mut Client| {
        let mut out = BytesMut::new();
        let now = client.now;
        client.connection.poll_transmit(now, &client.bucket, &mut out, usize::MAX);
        packets(&out).len() as u64
    };
    assert_eq!(client.control("set_priority", "medium"), Status::SUCCESS);
    assert_eq!(pass(&mut client), 5);
    assert_eq!(client.control("set_priority", "urgent"), Status::EINVAL);
    assert_eq!(pass(&mut client), 5, "what is refused changes nothing");
    assert_eq!(client.control("set_priority", "low"), Status::SUCCESS);
    assert_eq!(pass(&mut client), 1);
    let mut all = streaming(vec![on_disk()], &[]);
    assert_eq!(pass(&mut all), 1 + DOCUMENTS, "a client that asks for nothing gets all at once");
}

#[test]
fn ct_21_backfills_take_turns_or_follow_each_other() {
    for (order_asked_for, wanted) in
        [("round-robin", vec![0, 1, 2, 0, 1, 2]), ("sequential", vec![0, 1, 2])]
    {
        let controls = [("set_priority", "medium"), ("backfill_order", order_asked_for)];
        let mut client = streaming(vec![on_disk(), on_disk(), on_disk()], &controls);
        let order = order(&passes(&mut client));
        assert_eq!(&order[..wanted.len()], wanted, "{order_asked_for}");
        assert_eq!(order.len() == 3, order_asked_for == "sequential", "{order:?}");
    }
}

#[test]
fn ct_21_streams_from_memory_take_turns_with_the_backfill_that_runs() {
    let controls = [("set_priority", "medium"), ("backfill_order", "sequential")];
    let vbuckets = vec![on_disk(), in_memory(), on_disk(), in_memory()];
    let order = order(&passes(&mut streaming(vbuckets, &controls)));
    assert_eq!(&order[..6], [0, 1, 3, 0, 1, 3]);
    let (first, last) =
        (order.iter().position(|&vbid| vbid == 2), order.iter().rposition(|&vbid| vbid == 0));
    assert!(last < first, "the second backfill follows the first: {order:?}");
}

#[test]
fn ct_21_a_backfill_that_is_closed_makes_way_for_the_next() {
    let controls = [
        ("enable_noop", "true"),
        ("set_priority", "medium"),
        ("backfill_order", "sequential"),
        ("send_stream_end_on_client_close_stream", "true"),
    ];
    for with_end in [true, false] {
        let controls = &controls[..if with_end { 4 } else { 3 }];
        let mut client = streaming(vec![on_disk(), on_disk(), on_disk()], controls);
        for _ in 0..2 {
            // The others wait behind it.
            let mut out = BytesMut::new();
            let now = client.now;
            client.connection.poll_transmit(now, &client.bucket, &mut out, usize::MAX);
            assert!(packets(&out).iter().all(|packet| frame(packet).header.vbid() == Vbid(0)));
        }
        assert_eq!(client.close(None), Status::SUCCESS);
        assert_eq!(order(&passes(&mut client)), [1, 2], "with an end: {with_end}");
    }
}

#[test]
fn ct_21_a_stream_that_waits_for_its_backfill_ends_at_once() {
    let controls = [("set_priority", "medium"), ("backfill_order", "sequential")];
    let mut client = streaming(vec![on_disk(), on_disk(), on_disk()], &controls);
    let pass = |client: &mut Client| {
        let mut out = BytesMut::new();
        let now = client.now;
        client.connection.poll_transmit(now, &client.bucket, &mut out, usize::MAX);
        packets(&out)
    };
    pass(&mut client);
    client.connection.end_streams(Vbid(1), dcp_wire::message::StreamEndReason::OK);
    let ended = |packets: &[Vec<u8>]| {
        let ends = packets.iter().map(|packet| frame(packet).header);
        ends.filter(|header| header.opcode == Opcode::DCP_STREAM_END).map(|it| it.vbid().0).next()
    };
    let next: Vec<_> = (0..2).map(|_| pass(&mut client)).collect();
    assert_eq!(ended(&next.concat()), Some(1), "before the backfill of vBucket 0 is done");
    assert_eq!(order(&passes(&mut client)), [0, 2]);
}
