//! Messages of wrong layout, by the rows of the conformance tables.

use dcp_wire::message::*;
use dcp_wire::*;

use crate::frame;
use crate::golden_packets::packets;

#[test]
fn failover_log_that_is_empty_or_not_whole_is_refused() {
    for len in [0, 8, 15, 17, 24] {
        assert!(FailoverEntries::decode(&vec![0; len]).is_err(), "{len} bytes");
    }
}

#[test]
fn tombstones_may_have_any_datatype() {
    let deletion = |datatype: u8| {
        let mut packet = packets::<1>("GP-20")[0].clone();
        packet[5] = datatype;
        Deletion::decode(&frame(&packet)).map(drop)
    };
    // Servers before 7.0 send tombstones with a body, so every datatype is one of a tombstone.
    for datatype in 0..=0x07 {
        assert_eq!(deletion(datatype), Ok(()), "datatype {datatype}");
    }
}

#[test]
fn va_19_to_va_21_malformed_stream_messages_are_refused() {
    let mut mutation = packets::<1>("GP-18")[0].clone();
    mutation[24 + 29] = 4;
    assert!(Mutation::decode(&frame(&mutation)).is_err(), "extended metadata");

    let prepare = |change: fn(&mut [u8])| {
        let mut packet = packets::<1>("GP-30")[0].clone();
        change(&mut packet);
        Prepare::decode(&frame(&packet)).map(drop)
    };
    assert_eq!(prepare(|_| {}), Ok(()));
    assert!(prepare(|packet| packet[24 + 30] = 0).is_err(), "level 0");
    assert!(prepare(|packet| packet[24 + 30] = 4).is_err(), "level 4");
    assert!(prepare(|packet| packet[24 + 7] = 0).is_err(), "seqno 0");
    assert!(prepare(|packet| packet[23] = 0).is_err(), "CAS 0");

    let mut commit = packets::<1>("GP-31")[0].clone();
    commit[11] += 1;
    commit.push(b'v');
    assert!(Commit::decode(&frame(&commit)).is_err(), "a commit with a value");
}

#[test]
fn va_26_a_section_of_attributes_precedes_the_document() {
    let mut value = vec![0, 0, 0, 0x0f, 0, 0, 0, 0x0b];
    value.extend_from_slice(b"_k\0{\"a\":1}\0{}");
    let (xattrs, body) = xattr::split(&value).unwrap();
    let xattrs: Vec<_> = xattrs.map(Result::unwrap).collect();
    let [only] = xattrs[..] else { panic!("{xattrs:?}") };
    assert_eq!((only.name, only.value, only.is_system()), (&b"_k"[..], &br#"{"a":1}"#[..], true));
    assert_eq!(body, b"{}");
}
