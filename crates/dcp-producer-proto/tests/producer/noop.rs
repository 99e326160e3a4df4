//! Noops and idle connections.

use std::time::Duration;

use dcp_producer_proto::Disconnect;
use dcp_wire::message::OpenFlags;
use dcp_wire::{Frame, Opaque, Opcode, Status};

use crate::client::{Client, LEGACY};
use dcp_test::bucket::{Bucket, VBucket};

const FIRST: Opaque = Opaque(10_000_001);

fn client(controls: &[(&str, &str)]) -> Client {
    Client::open_with(Bucket::with(VBucket::new()), LEGACY, OpenFlags::PRODUCER, controls)
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn np_01_and_np_02_a_noop_is_sent_once_the_interval_has_passed() {
    let mut client = client(&[("enable_noop", "true"), ("set_noop_interval", "1.5")]);
    let due = client.now + Duration::from_millis(1500);
    assert_eq!(client.connection.poll_timeout(), Some(due));
    client.pass(Duration::from_millis(1499));
    assert!(client.receive().is_empty());
    client.pass(Duration::from_millis(1));
    assert_eq!(client.connection.handle_timeout(client.now), Ok(()));
    assert_eq!(client.receive(), ["NOOP 10000001"]);
}

#[test]
fn np_04_and_np_09_there_is_one_noop_at_a_time() {
    let mut client = client(&[("enable_noop", "true")]);
    client.pass(secs(201));
    assert_eq!(client.receive(), ["NOOP 10000001"]);
    client.pass(secs(100));
    assert!(client.receive().is_empty(), "the first is not answered");
    client.respond(Opcode::DCP_NOOP, Status::SUCCESS, FIRST).unwrap();
    assert_eq!(client.receive(), ["NOOP 10000002"], "the interval counts from the last one sent");
}

#[test]
fn np_07_and_np_10_silent_client_is_closed_after_the_idle_timeout() {
    let mut client = client(&[("enable_noop", "true")]);
    let opened = client.now;
    client.pass(secs(201));
    client.receive();
    assert_eq!(client.connection.poll_timeout(), Some(opened + secs(360)));
    client.pass(secs(158));
    assert_eq!(client.connection.handle_timeout(client.now), Ok(()), "NP-07");
    client.pass(secs(1));
    assert_eq!(client.connection.handle_timeout(client.now), Err(Disconnect::Idle(secs(360))));
}

#[test]
fn noop_idle_clock_restarts_with_anything_received() {
    let mut client = client(&[("enable_noop", "true")]);
    client.pass(secs(359));
    client.connection.handle_received(client.now);
    client.pass(secs(359));
    assert_eq!(client.connection.handle_timeout(client.now), Ok(()));
    client.control("set_priority", "low");
    client.pass(secs(359));
    assert_eq!(client.connection.handle_timeout(client.now), Ok(()));
}

#[test]
fn np_08_without_noops_a_client_may_be_silent_for_ever() {
    let mut client = client(&[]);
    assert_eq!(client.connection.poll_timeout(), None);
    client.pass(secs(36_000));
    assert_eq!(client.connection.handle_timeout(client.now), Ok(()));
    assert!(client.receive().is_empty());
}

#[test]
fn noops_are_not_sent_by_a_server_that_receives_changes() {
    let bucket = Bucket::with(VBucket::new());
    let mut client = Client::open_with(bucket, LEGACY, OpenFlags::empty(), &[]);
    assert_eq!(client.connection.poll_timeout(), Some(client.now + secs(360)));
    client.pass(secs(359));
    assert!(client.receive().is_empty());
    assert_eq!(client.connection.handle_timeout(client.now), Ok(()));
    client.pass(secs(1));
    assert_eq!(client.connection.handle_timeout(client.now), Err(Disconnect::Idle(secs(360))));
}

#[test]
fn np_11_to_np_13_only_the_last_noops_answer_is_taken_whatever_it_says() {
    let unexpected =
        |status| Err(Disconnect::UnexpectedResponse { opcode: Opcode::DCP_NOOP, status });
    for (opaque, status, wanted) in [
        (FIRST, Status::SUCCESS, Ok(())),
        (FIRST, Status::EINVAL, Ok(())),
        (Opaque(123), Status::SUCCESS, unexpected(Status::SUCCESS)),
        (Opaque(0), Status::SUCCESS, unexpected(Status::SUCCESS)),
        (Opaque(123), Status::EINVAL, unexpected(Status::EINVAL)),
        (Opaque(123), Status::NOT_MY_VBUCKET, Ok(())),
        (Opaque(123), Status::KEY_EEXISTS, Ok(())),
        (Opaque(123), Status::KEY_ENOENT, Ok(())),
        (Opaque(123), Status::DCP_STREAM_NOT_FOUND, Ok(())),
        (Opaque(123), Status::OPAQUE_NO_MATCH, Ok(())),
    ] {
        let mut client = client(&[("enable_noop", "true")]);
        client.pass(secs(20));
        assert_eq!(client.receive(), ["NOOP 10000001"]);
        assert_eq!(client.respond(Opcode::DCP_NOOP, status, opaque), wanted, "{opaque} {status}");
    }
}

#[test]
fn noop_answer_that_no_noop_was_sent_for_ends_the_connection() {
    let mut client = client(&[("enable_noop", "true")]);
    assert!(client.respond(Opcode::DCP_NOOP, Status::SUCCESS, Opaque(10_000_000)).is_err());
}

#[test]
fn np_15_malformed_noop_is_refused_and_a_well_formed_one_disconnects() {
    let mut client = client(&[]);
    let mut packet = Vec::new();
    Frame::request(Opcode::DCP_NOOP).with_key(b"k").encode(&mut packet).unwrap();
    assert_eq!(client.status(&packet), Status::EINVAL);
    packet.clear();
    Frame::request(Opcode::DCP_NOOP).encode(&mut packet).unwrap();
    assert_eq!(client.exchange(&packet), Err(Disconnect::UnexpectedRequest(Opcode::DCP_NOOP)));
}

#[test]
fn np_17_a_new_idle_timeout_applies_at_once() {
    let mut client = client(&[("enable_noop", "true")]);
    client.connection.set_idle_timeout(secs(100));
    client.pass(secs(150));
    client.connection.set_idle_timeout(secs(200));
    assert_eq!(client.connection.handle_timeout(client.now), Ok(()));
    client.pass(secs(50));
    assert!(client.connection.handle_timeout(client.now).is_err());
}

#[test]
fn gp_23_a_noop_on_the_wire() {
    let mut client = client(&[("enable_noop", "true")]);
    client.pass(secs(20));
    let packet = client.receive_packets().remove(0);
    let mut wanted = [0; 24];
    wanted[..2].copy_from_slice(&[0x80, 0x5c]);
    wanted[12..16].copy_from_slice(&[0x00, 0x98, 0x96, 0x81]);
    assert_eq!(packet, wanted);
}
