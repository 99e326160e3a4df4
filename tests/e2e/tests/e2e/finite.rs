//! Reads that end.

use std::collections::BTreeMap;

use dcp_consumer::{End, Start};
use dcp_e2e::{History, Reader, options};
use dcp_wire::{Seqno, Vbid};

#[tokio::test(flavor = "multi_thread")]
async fn a_read_until_now_is_what_was_written() {
    for (nodes, vbuckets) in [(1, 1), (1, 64), (2, 64), (3, 16)] {
        for (count, len) in [(0, 0), (1, 10), (700, 64), (60, 20_000)] {
            for persisted in [false, true] {
                let mut history = History::start(nodes, vbuckets).await;
                history.load("doc", count, len);
                if persisted {
                    history.producer.persist();
                }
                let rows = Reader::read_now(&history.producer).await;
                let shape = format!(
                    "{count} of {len} bytes, {nodes} nodes, {vbuckets} vBuckets, on disk {persisted}"
                );
                assert_eq!(rows.len(), count, "{shape}");
                history.ledger.assert_read(&rows, &BTreeMap::new());
                history.producer.shutdown().await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn overwritten_removed_and_expired_documents_end_in_their_last_state() {
    for persisted in [false, true] {
        let mut history = History::start(2, 16).await;
        history.load("doc", 300, 100);
        history.load("doc", 100, 200);
        for number in 50..80 {
            history.remove(&format!("doc-{number}"));
        }
        for number in 70..110 {
            let key = format!("doc-{number}");
            if number >= 80 {
                history.expire(&key);
            } else {
                history.upsert(&key, "again");
                history.expire(&key);
            }
        }
        if persisted {
            history.producer.persist();
        }
        let rows = Reader::read_now(&history.producer).await;
        history.ledger.assert_read(&rows, &BTreeMap::new());
        assert_eq!(rows.iter().filter(|row| row.op == "expiration").count(), 40);
        let deletions = rows.iter().filter(|row| row.op == "deletion").count();
        if persisted {
            assert_eq!((rows.len(), deletions), (300, 20), "one change per key from disk");
        } else {
            assert!((20..=30).contains(&deletions), "{deletions} deletions");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_ends_where_it_was_told_to() {
    let mut history = History::start(1, 4).await;
    history.load("doc", 400, 50);
    let ends = BTreeMap::from([(Vbid(1), Seqno(10)), (Vbid(3), Seqno(20))]);
    let mut reader =
        Reader::open(&history.producer, options(Start::Earliest, End::At(ends.clone()))).await;
    let rows = reader.rest().await;
    let mut highest = BTreeMap::new();
    for row in &rows {
        highest.insert(row.vbid, row.seqno);
    }
    assert_eq!(highest.keys().collect::<Vec<_>>(), ends.keys().collect::<Vec<_>>());
    for (vbid, end) in ends {
        // The snapshot that holds the end is delivered whole, and the end is in it.
        assert!(highest[&vbid] >= end, "{vbid} ended at {}", highest[&vbid]);
        let seqnos: Vec<_> = rows.iter().filter(|row| row.vbid == vbid).collect();
        assert_eq!(seqnos.len() as u64, highest[&vbid].0, "{vbid}: nothing is left out");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_vbuckets_asked_for_are_read() {
    let mut history = History::start(2, 16).await;
    history.load("doc", 800, 50);
    let mut asked = options(Start::Earliest, End::Now);
    asked.vbuckets = Some(vec![Vbid(3), Vbid(12)]);
    let rows = Reader::open(&history.producer, asked).await.rest().await;
    assert!(rows.iter().all(|row| row.vbid == Vbid(3) || row.vbid == Vbid(12)));
    for vbid in [Vbid(3), Vbid(12)] {
        let of: Vec<_> = rows.iter().filter(|row| row.vbid == vbid).cloned().collect();
        history.ledger.only(vbid).assert_read(&of, &BTreeMap::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn documents_that_were_written_compressed_are_read_as_they_were() {
    let mut history = History::start(1, 4).await;
    for number in 0..200 {
        let value = format!("{{\"n\":{number},\"text\":\"{}\"}}", "abc ".repeat(number + 50));
        if number % 3 == 0 {
            history.upsert(&format!("doc-{number}"), value);
        } else {
            history.upsert_compressed(&format!("doc-{number}"), value).await;
        }
    }
    for persisted in [false, true] {
        if persisted {
            history.producer.persist();
        }
        let rows = Reader::read_now(&history.producer).await;
        assert_eq!(rows.len(), 200);
        history.ledger.assert_read(&rows, &BTreeMap::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_streams_of_one_client_do_not_disturb_each_other() {
    let mut history = History::start(2, 32).await;
    history.load("doc", 2000, 300);
    let (one, two) =
        tokio::join!(Reader::read_now(&history.producer), Reader::read_now(&history.producer));
    assert_eq!((one.len(), two.len()), (2000, 2000));
    history.ledger.assert_read(&one, &BTreeMap::new());
    history.ledger.assert_read(&two, &BTreeMap::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_of_1024_vbuckets_is_read_whole() {
    let mut history = History::start(2, 1024).await;
    history.load("doc", 5000, 64);
    let mut reader = Reader::open(&history.producer, options(Start::Earliest, End::Now)).await;
    let rows = reader.rest().await;
    assert_eq!(rows.len(), 5000);
    history.ledger.assert_read(&rows, &BTreeMap::new());
    let stats = reader.stream.stats();
    assert_eq!((stats.complete, stats.failed), (1024, 0));
    let checkpoint = reader.stream.checkpoint();
    for (vbid, seqno) in history.producer.high_seqnos() {
        let position = checkpoint.position(vbid).map(|position| position.seqno);
        assert_eq!(position.unwrap_or_default(), seqno, "{vbid}");
    }
}
