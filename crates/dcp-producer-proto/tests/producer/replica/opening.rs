//! What the consumer's end asks for before its first stream.

use super::*;

/// A real node's consumer, recorded: the same packets in the same order, to the byte.
#[test]
fn node_opens_replication_as_recorded() {
    let recordings = [
        ("6.0.5-replication", V6, 26_843_545, 1000, None, LEGACY),
        ("8.0.2-replication", ServerVersion::NEWEST, 26_843_546, 100, Some("n_1"), COLLECTIONS),
    ];
    for (name, server_version, buffer_size, noop_ms, consumer_name, features) in recordings {
        let scenario = Scenario::load(name).unwrap();
        let config = Config {
            server_version,
            consumer_name: consumer_name.map(str::to_owned),
            buffer_size,
            noop_interval: core::time::Duration::from_millis(noop_ms),
        };
        let mut peer = Peer::new(Store::new(), &config, features);
        for &vbid in &scenario.vbuckets {
            // The opaques that the manager of the recorded cluster gave.
            let request = Frame::request(Opcode::DCP_ADD_STREAM)
                .with_opaque(Opaque(0x000a_dd00 + u32::from(vbid)))
                .with_vbid(Vbid(vbid));
            peer.handle(&encoded(request.with_extras(&[0; 4]))).unwrap();
        }
        let mut sent = Vec::new();
        let mut compared = 0;
        for event in &scenario.events {
            match &event.kind {
                EventKind::ClientPacket(packet) => {
                    if sent.is_empty() {
                        sent = peer.take();
                        sent.reverse();
                    }
                    let ours = sent.pop().unwrap_or_else(|| panic!("{name}: {packet:02x?}"));
                    assert_eq!(ours, *packet, "{name}, packet {compared}");
                    compared += 1;
                }
                EventKind::ServerPacket(packet) => peer.handle(packet).unwrap(),
                _ => {}
            }
        }
        assert!(sent.is_empty() && peer.take().is_empty(), "{name}: nothing else is sent");
        assert!(compared > 15, "{name}");
        assert_eq!(peer.store.seqnos(), (1..=10).collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn replication_requests_each_wait_for_the_answer_before() {
    let mut peer = Peer::new(Store::new(), &Config::default(), COLLECTIONS);
    peer.handle(&add_stream(VB, StreamRequestFlags::empty())).unwrap();
    loop {
        let sent = peer.take();
        assert_eq!(sent.len(), 1, "one at a time");
        assert!(peer.take().is_empty(), "nothing before it is answered");
        let request = frame(&sent[0]).header;
        if request.opcode == Opcode::DCP_STREAM_REQ {
            break;
        }
        let answer = Frame::response(request.opcode, Status::SUCCESS);
        peer.handle(&encoded(answer.with_opaque(request.opaque))).unwrap();
    }
}

#[test]
fn marker_version_is_requested_where_a_server_would_grant_it() {
    let older = ServerVersion { major: 7, minor: 6, patch: 11 };
    for (server_version, features, is_asked_for) in [
        (ServerVersion::NEWEST, COLLECTIONS, true),
        (ServerVersion::NEWEST, LEGACY, false),
        (older, COLLECTIONS, false),
    ] {
        let config = Config { server_version, ..Config::default() };
        let mut peer = Peer::new(Store::new(), &config, features);
        peer.handle(&add_stream(VB, StreamRequestFlags::empty())).unwrap();
        let mut asked_for = Vec::new();
        peer.negotiate_with(|key| {
            asked_for.push(key.to_vec());
            Status::SUCCESS
        });
        let version = Control::MAX_MARKER_VERSION.as_bytes();
        assert_eq!(
            asked_for.iter().any(|key| key == version),
            is_asked_for,
            "{server_version:?} {features:?}"
        );
    }
}

/// A connection on which the server is the consumer, with what DCP_OPEN says of it.
fn opened(server_version: ServerVersion, value: &[u8]) -> Client {
    let mut bucket = Bucket::with(VBucket::new());
    bucket.node.copies = Copies(Rc::new(Store::new()));
    let mut client = Client::new(bucket, COLLECTIONS);
    let config = ConnectionConfig { server_version, ..ConnectionConfig::default() };
    client.connection = dcp_producer_proto::Connection::new(config);
    let datatype = if value.is_empty() { Datatype::RAW } else { Datatype::JSON };
    let open = Open { flags: OpenFlags::empty(), name: b"replication", value, datatype };
    assert_eq!(
        client.status(&message(|out| open.encode(Opaque(1), out).unwrap())),
        Status::SUCCESS
    );
    client
}

#[test]
fn connection_opened_without_the_producer_flag_is_a_consumers() {
    for (server_version, value, first, is_named) in [
        (ServerVersion::NEWEST, &b""[..], Opcode::GET_ERROR_MAP, false),
        (ServerVersion::NEWEST, br#"{"consumer_name":"n1"}"#, Opcode::GET_ERROR_MAP, true),
        (V6, b"", Opcode::DCP_CONTROL, false),
    ] {
        let mut client = opened(server_version, value);
        let add = add_stream(VB, StreamRequestFlags::empty());
        assert_eq!(client.exchange(&add), Ok(None), "answered once the stream is open");
        let (now, mut out) = (client.now, BytesMut::new());
        let mut sent: Vec<Vec<u8>> = Vec::new();
        loop {
            let before = out.len();
            let transmit = client.connection.poll_transmit(now, &client.bucket, &mut out, 1);
            assert_eq!(transmit, Transmit { written: out.len() - before, more: false });
            let new = packets(&out[before..]);
            if new.is_empty() {
                break;
            }
            for request in new.iter().map(|packet| frame(packet).header) {
                let answer = Frame::response(request.opcode, Status::SUCCESS);
                let answer = encoded(answer.with_opaque(request.opaque));
                if request.opcode != Opcode::DCP_STREAM_REQ {
                    assert_eq!(client.exchange(&answer), Ok(None));
                }
            }
            sent.extend(new);
        }
        assert_eq!(frame(&sent[0]).header.opcode, first, "{server_version:?}");
        assert_eq!(frame(sent.last().unwrap()).header.opcode, Opcode::DCP_STREAM_REQ);
        let name = sent.iter().map(|packet| frame(packet)).find(|it| it.key == b"consumer_name");
        assert_eq!(name.map(|it| it.value), is_named.then_some(&b"n1"[..]), "{server_version:?}");
    }
}

#[test]
fn node_that_is_warming_up_receives_no_changes() {
    let mut client = Client::new(Bucket::with(VBucket::new()), COLLECTIONS);
    client.bucket.node.is_warming_up = true;
    assert_eq!(client.send_open(OpenFlags::empty()), Status::ETMPFAIL);
    assert_eq!(client.send_open(OpenFlags::PRODUCER), Status::SUCCESS);
}
