//! What a copy acknowledges, to the producer and to the manager, and when.

use super::*;

/// Streams of durable writes, recorded, as a replica takes them. Opaques are those of our requests.
#[test]
fn durable_writes_on_record_are_taken_and_acknowledged() {
    for (name, start, expected, acknowledged) in [
        ("8.0.2-sync-live-replica-ack", 10, &[11, 12][..], &[11][..]),
        ("8.0.2-sync-disk-syncrepl", 0, &[1, 5, 7, 8, 10], &[]),
        ("8.0.2-sync-memory-syncrepl", 0, &[1, 5, 7, 8, 10], &[]),
    ] {
        let scenario = Scenario::load(name).unwrap();
        let store = Store::at(start, (start, start), &[(0xb5c1_248a_f753, 0)]);
        let config = Config { consumer_name: Some("n1".into()), ..Config::default() };
        let mut peer = Peer::new(store, &config, LEGACY);
        let request = peer.begin();
        assert_eq!((request.start_seqno.0, request.snapshot_start.0), (start, start), "{name}");
        let mut acks = Vec::new();
        for event in scenario.events.iter().filter(|event| event.conn == 0) {
            let EventKind::ServerPacket(packet) = &event.kind else {
                continue;
            };
            let mut frame = frame(packet);
            let opcode = frame.header.opcode;
            if !(0x53..=0x65).contains(&opcode.0) || opcode == Opcode::DCP_CONTROL {
                continue;
            }
            frame.header.opaque = request.opaque;
            if !frame.header.magic.is_response() {
                frame = frame.with_vbid(VB);
            }
            peer.handle(&encoded(frame)).unwrap();
            for packet in peer.take() {
                let sent = crate::client::frame(&packet);
                if sent.header.opcode == Opcode::DCP_SEQNO_ACK {
                    assert_eq!(sent.header.vbid(), VB);
                    acks.push(u64::from_be_bytes(sent.extras.try_into().unwrap()));
                }
            }
        }
        assert_eq!((&peer.store.seqnos()[..], &acks[..]), (expected, acknowledged), "{name}");
    }
}

#[test]
fn snapshot_is_acknowledged_once_it_ends_if_it_asks_for_it() {
    let mut peer = Peer::streaming(Store::new());
    let flags = SnapshotFlags::MEMORY | SnapshotFlags::ACK;
    for packet in [marker(0, 2, flags), mutation(1)] {
        assert_eq!(peer.answer(&packet), None);
    }
    peer.handle(&mutation(2)).unwrap();
    let expected = Frame::response(Opcode::DCP_SNAPSHOT_MARKER, Status::SUCCESS);
    assert_eq!(peer.take(), [encoded(expected.with_opaque(TO.opaque))]);
}

/// The prepares that it acknowledges now.
fn acknowledged(peer: &mut Peer) -> Vec<u64> {
    let packets = peer.take();
    let acks = packets.iter().map(|packet| frame(packet));
    let acks = acks.filter(|frame| frame.header.opcode == Opcode::DCP_SEQNO_ACK);
    acks.map(|frame| u64::from_be_bytes(frame.extras.try_into().unwrap())).collect()
}

#[test]
fn prepares_are_acknowledged_once_the_copy_meets_their_level() {
    let (memory, disk) = (DurabilityLevel::MAJORITY, DurabilityLevel::PERSIST_TO_MAJORITY);
    let mut peer = Peer::streaming(Store::new());
    for packet in [marker(0, 2, SnapshotFlags::MEMORY), prepare(1, memory)] {
        peer.handle(&packet).unwrap();
        assert!(acknowledged(&mut peer).is_empty(), "its snapshot has not ended");
    }
    peer.handle(&mutation(2)).unwrap();
    assert_eq!(acknowledged(&mut peer), [1]);
    let packets = [marker(3, 4, SnapshotFlags::MEMORY), prepare(3, disk), prepare(4, memory)];
    packets.iter().for_each(|packet| peer.handle(packet).unwrap());
    assert!(acknowledged(&mut peer).is_empty(), "what is not on disk holds up what follows");
    peer.store.0.borrow_mut().persisted = 3;
    assert_eq!(acknowledged(&mut peer), [4]);
    // One that is over holds up nothing.
    peer.store.0.borrow_mut().persisted = 0;
    let packets = [marker(5, 6, SnapshotFlags::MEMORY), prepare(5, disk), prepare(6, memory)];
    packets.iter().for_each(|packet| peer.handle(packet).unwrap());
    assert!(acknowledged(&mut peer).is_empty());
    let packets = [marker(7, 7, SnapshotFlags::MEMORY), commit(5, 7)];
    packets.iter().for_each(|packet| peer.handle(packet).unwrap());
    assert_eq!(acknowledged(&mut peer), [6]);
    // Of several in a snapshot, the last stands for all of its level.
    let mut peer = Peer::streaming(Store::new());
    let packets = [marker(0, 2, SnapshotFlags::MEMORY), prepare(1, memory), prepare(2, memory)];
    packets.iter().for_each(|packet| peer.handle(packet).unwrap());
    assert_eq!(acknowledged(&mut peer), [2]);
    // What ended is acknowledged, whatever has come since.
    let mut peer = Peer::streaming(Store::new());
    for (start, end) in [(0, 1), (2, 3)] {
        peer.handle(&marker(start, end, SnapshotFlags::MEMORY)).unwrap();
        peer.handle(&prepare(start.max(1), memory)).unwrap();
    }
    assert_eq!(acknowledged(&mut peer), [1]);
    // What a copy had before is acknowledged on a new stream.
    let store = Store::at(9, (9, 9), &[(0xb, 0)]);
    store.0.borrow_mut().outstanding = vec![(Seqno(8), memory)];
    let config = Config { consumer_name: Some("n1".into()), ..Config::default() };
    let mut peer = Peer::new(store, &config, COLLECTIONS);
    let request = peer.begin();
    peer.accept(request.opaque, &[(0xb, 0)]);
    assert_eq!(acknowledged(&mut peer), [8]);
}

#[test]
fn node_without_a_name_acknowledges_no_prepare() {
    let mut peer = Peer::new(Store::new(), &Config::default(), COLLECTIONS);
    let request = peer.begin();
    peer.accept(request.opaque, &[(0xb, 0)]);
    let packets = [marker(0, 1, SnapshotFlags::MEMORY), prepare(1, DurabilityLevel::MAJORITY)];
    packets.iter().for_each(|packet| peer.handle(packet).unwrap());
    assert!(acknowledged(&mut peer).is_empty());
}

#[test]
fn prepare_that_is_aborted_does_not_take_an_earlier_one_with_it() {
    let disk = DurabilityLevel::PERSIST_TO_MAJORITY;
    let mut peer = Peer::streaming(Store::new());
    let aborted = Abort { prepared_seqno: Seqno(2), abort_seqno: Seqno(3), key: b"\0key" };
    for packet in [
        marker(0, 2, SnapshotFlags::MEMORY),
        prepare(1, disk),
        prepare(2, disk),
        marker(3, 3, SnapshotFlags::MEMORY),
        message(|out| aborted.encode(TO, out).unwrap()),
    ] {
        peer.handle(&packet).unwrap();
    }
    assert!(acknowledged(&mut peer).is_empty(), "the first is not on disk yet");
    peer.store.0.borrow_mut().persisted = 3;
    assert_eq!(acknowledged(&mut peer), [1]);
}

#[test]
fn fc_44_and_fc_46_more_than_a_fifth_of_the_window_is_acknowledged() {
    let config = Config { buffer_size: 1000, ..Config::default() };
    let mut peer = Peer::new(Store::new(), &config, COLLECTIONS);
    let request = peer.begin();
    peer.accept(request.opaque, &[(0xb, 0)]);
    peer.take();
    // Nothing but its length matters: there is no such stream.
    let to = StreamAddress { vbid: Vbid(9), ..TO };
    let packet = |value: &'static [u8]| {
        let mutation = Mutation { seqno: Seqno(1), key: b"\0k", value, ..Mutation::default() };
        message(|out| mutation.encode(to, out).unwrap())
    };
    let acks = |peer: &mut Peer| -> Vec<Vec<u8>> {
        let is_ack = |packet: &Vec<u8>| frame(packet).header.opcode == Opcode::DCP_BUFFER_ACK;
        peer.take().into_iter().filter(is_ack).collect()
    };
    let first = packet(&[0; 143]);
    assert_eq!(first.len(), 200);
    peer.handle(&first).unwrap();
    assert!(acks(&mut peer).is_empty());
    peer.handle(&packet(&[0; 0])).unwrap();
    for bytes in [257_u32, 201] {
        let sent = acks(&mut peer);
        assert_eq!(sent.len(), 1);
        assert_eq!(frame(&sent[0]).extras, bytes.to_be_bytes(), "what came since the last one");
        peer.handle(&packet(&[0; 144])).unwrap();
    }
}

#[test]
fn acknowledgements_are_answered_only_if_they_are_refused() {
    for opcode in [Opcode::DCP_BUFFER_ACK, Opcode::DCP_SEQNO_ACK] {
        let answer = |status| encoded(Frame::response(opcode, status));
        let mut peer = Peer::streaming(Store::new());
        assert_eq!(peer.answer(&answer(Status::EINVAL)), None);
        let unexpected = Disconnect::UnexpectedResponse { opcode, status: Status::SUCCESS };
        assert_eq!(peer.handle(&answer(Status::SUCCESS)), Err(unexpected));
    }
}

#[test]
fn producer_without_flow_control_is_sent_no_acknowledgements() {
    let config = Config { buffer_size: 10, ..Config::default() };
    let mut peer = Peer::new(Store::new(), &config, COLLECTIONS);
    peer.handle(&add_stream(VB, StreamRequestFlags::empty())).unwrap();
    let request = peer.negotiate_with(|key| {
        let is_window = key == Control::CONNECTION_BUFFER_SIZE.as_bytes();
        if is_window { Status::NOT_SUPPORTED } else { Status::SUCCESS }
    });
    peer.accept(request.opaque, &[(0xb, 0)]);
    peer.take();
    peer.handle(&marker(0, 1, SnapshotFlags::MEMORY)).unwrap();
    assert!(peer.take().is_empty());
}
