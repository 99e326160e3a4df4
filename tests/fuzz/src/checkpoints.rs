//! Documents in which positions are kept: checkpoints, offsets of micro-batches, plans.

use dcp_meter::Meter;
use dcp_proto::checkpoint::{Checkpoint, Offsets};
use dcp_proto::plan::ReadPlan;

use crate::bytes_in::BytesIn;

/// Whatever a document: what is read is sound, and the same once it is written and read again.
pub fn checkpoint(data: &[u8]) {
    let mut bytes = BytesIn::new(data);
    match bytes.u8() % 8 {
        0 => read_checkpoint(bytes.rest()),
        // Damage behind a checksum that agrees, which damage does not make by itself.
        version @ 1..=3 => read_checkpoint(&sealed_checkpoint(version, bytes.rest())),
        4 => read_offsets(bytes.rest()),
        5 => read_offsets(&sealed_offsets(bytes.rest())),
        6 => read_plan(bytes.rest()),
        _ => {
            let start = sealed_checkpoint(3, bytes.line());
            let start = serde_json::Value::from(String::from_utf8_lossy(&start));
            let head = format!(r#"{{"node":"n","start":{start},"#).into_bytes();
            let content = [&head, bytes.rest()].concat();
            read_plan(&sealed("dcp_rs read plan", 1, &content));
        }
    }
}

/// A checkpoint with this content, whose checksum is right if the content is written as it is.
fn sealed_checkpoint(version: u8, content: &[u8]) -> Vec<u8> {
    sealed("dcp_rs checkpoint", version, content)
}

/// The same of any document of this form.
fn sealed(format: &str, version: u8, content: &[u8]) -> Vec<u8> {
    let crc = crc32fast::hash(content);
    let head =
        format!(r#"{{"format":"{format}","version":{version},"crc32":"{crc:08x}","content":"#);
    [head.as_bytes(), content, b"}"].concat()
}

/// The same of offsets.
fn sealed_offsets(content: &[u8]) -> Vec<u8> {
    let crc = crc32fast::hash(content);
    let open = content.strip_suffix(b"}").unwrap_or(content);
    [open, format!(r#","c":"{crc:08x}"}}"#).as_bytes()].concat()
}

fn read_checkpoint(document: &[u8]) {
    let meter = Meter::start();
    let read = Checkpoint::from_json(document);
    // Positions lie in blocks of 64, and each is larger than what it is read from.
    let (most, allowed) = (meter.most(), 64 * document.len() + (1 << 20));
    assert!(most <= allowed, "{most} bytes for {}", document.len());
    let Ok(read) = read else { return };
    check(&read);
    let again = Checkpoint::from_json(read.to_json().as_bytes()).expect("it was written");
    assert_eq!(again, read);
    assert_eq!(again.to_json(), read.to_json());
    let mut joined = read.restricted_to([]);
    joined.merge(&read).expect("parts of one checkpoint");
    assert_eq!(joined, read);
}

fn check(checkpoint: &Checkpoint) {
    for (vbid, position) in checkpoint.positions() {
        let snapshot = position.snapshot;
        assert!(snapshot.start <= position.seqno && position.seqno <= snapshot.end);
        let history = checkpoint.history(vbid).expect("a position has one");
        let seqnos = history.points().iter().map(|point| point.seqno);
        assert!(seqnos.clone().is_sorted() && seqnos.max().is_none_or(|it| it <= position.seqno));
    }
}

fn read_offsets(document: &[u8]) {
    let Ok(text) = std::str::from_utf8(document) else { return };
    let Ok(read) = Offsets::from_json(text) else { return };
    assert_eq!(read.iter().count(), read.num_vbuckets());
    let again = Offsets::from_json(&read.to_json()).expect("it was written");
    assert_eq!(again, read);
    assert!(read.check(read.bucket_uuid(), read.num_vbuckets()).is_ok());
    assert!(read.check("another", read.num_vbuckets()).is_err() || read.bucket_uuid() == "another");
}

fn read_plan(document: &[u8]) {
    let Ok(text) = std::str::from_utf8(document) else { return };
    let Ok(read) = ReadPlan::from_json(text) else { return };
    check(&read.start);
    let again = ReadPlan::from_json(&read.to_json()).expect("it was written");
    assert_eq!(again, read);
    assert_eq!(read.ranges().count(), read.to.len());
    let streamed: Vec<_> = read.streamed().map(|range| range.vbid).collect();
    for range in read.ranges() {
        let reads = streamed.contains(&range.vbid);
        assert_eq!(reads, range.size() > 0 || range.rollback().is_none(), "{range:?}");
    }
}
