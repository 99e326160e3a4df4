//! What the consumer's end asks for before its first stream.

use super::*;

/// A real node's consumer, recorded: the same packets in the same order, to the byte.
#[test]
fn a_node_opens_replication_as_recorded() {
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
