//! The models. Each is a closure that loom runs once for every interleaving; one where a task waits
//! for a wake-up that never comes is reported as a deadlock.
//!
//! A thread is interrupted at most three times where it could go on, which keeps the models to
//! seconds; `LOOM_MAX_PREEMPTIONS` sets another bound.

use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use dcp_proto::checkpoint::{Checkpoint, StoredFilter};
use dcp_proto::consumer::PositionUpdate;
use dcp_proto::{History, Position, Snapshot};
use dcp_wire::{Seqno, Vbid};
use loom::future::block_on;
use loom::sync::mpsc;
use loom::thread;

use crate::queue::{Credit, Entry, Queue, Queued, SharedState};
use crate::sync::{Arc, AtomicBool};
use crate::watermark::Acknowledger;

const MAX_PREEMPTIONS: usize = 3;

/// Tries every interleaving of `model`; returns how many there are.
fn explore(model: impl Fn() + Send + Sync + 'static) -> usize {
    // Not one of loom's types, which are fresh in every run.
    let runs = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&runs);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(MAX_PREEMPTIONS);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    runs.load(Ordering::Relaxed)
}

/// A batch of one byte, as a driver cuts it.
fn push(queue: &Queue<u64>, shared: &Arc<SharedState>, batch: u64) {
    let credit = Credit::new(Arc::clone(shared), 1);
    queue.push(Entry::Batch(Queued { batch, rows: 1, positions: Vec::new(), credit }));
}

/// The next batch, as an application waits for it.
fn pop(queue: &Queue<u64>) -> (u64, Credit) {
    match block_on(poll_fn(|context| queue.poll_pop(context))) {
        Entry::Batch(queued) => (queued.batch, queued.credit),
        other => panic!("not a batch: {other:?}"),
    }
}

/// A driver that never has more than `window` unacknowledged bytes, and an application that returns
/// each batch once it has processed it.
///
/// Every batch arrives, in order; the queue never holds more than the window; and a driver without
/// room is woken by the bytes that come back.
pub fn batches_arrive_in_order_within_the_window(batches: u64, window: u64) -> usize {
    explore(move || {
        let (queue, shared) = (Arc::new(Queue::new()), Arc::new(SharedState::default()));
        let driver = thread::spawn({
            let (queue, shared) = (Arc::clone(&queue), Arc::clone(&shared));
            move || {
                let mut unacknowledged = 0;
                for batch in 0..batches {
                    unacknowledged -= shared.take_returned();
                    while unacknowledged == window {
                        block_on(shared.wake.notified());
                        unacknowledged -= shared.take_returned();
                    }
                    unacknowledged += 1;
                    push(&queue, &shared, batch);
                    assert!(shared.queued_bytes() <= window, "{} bytes", shared.queued_bytes());
                    assert!(shared.queued() as u64 <= window, "{} batches", shared.queued());
                }
                while unacknowledged > 0 {
                    block_on(shared.wake.notified());
                    unacknowledged -= shared.take_returned();
                }
            }
        });
        for expected in 0..batches {
            let (batch, credit) = pop(&queue);
            assert_eq!(batch, expected);
            credit.give_back();
        }
        driver.join().unwrap();
        assert_eq!((shared.queued(), shared.queued_bytes(), shared.take_returned()), (0, 0, 0));
    })
}

/// A driver that waits until the application has taken everything is woken, whether it began to
/// wait before or after the last batch was taken.
pub fn the_last_batch_taken_wakes_the_driver(batches: u64) -> usize {
    explore(move || {
        let (queue, shared) = (Arc::new(Queue::new()), Arc::new(SharedState::default()));
        let application = thread::spawn({
            let queue = Arc::clone(&queue);
            move || (0..batches).for_each(|_| drop(pop(&queue)))
        });
        (0..batches).for_each(|batch| push(&queue, &shared, batch));
        while shared.awaits_taking() {
            block_on(shared.wake.notified());
        }
        assert_eq!(shared.queued(), 0);
        application.join().unwrap();
    })
}

/// Two drivers and one application, which first polls and gives up: it has every batch, those of
/// each driver in order.
pub fn two_drivers_and_a_reader_that_gave_up_once(batches: u64) -> usize {
    explore(move || {
        let queue = Arc::new(Queue::new());
        let drivers = [0, 100].map(|first| {
            let (queue, shared) = (Arc::clone(&queue), Arc::new(SharedState::default()));
            thread::spawn(move || (first..first + batches).for_each(|it| push(&queue, &shared, it)))
        });
        let mut seen = Vec::new();
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(Entry::Batch(queued)) = queue.poll_pop(&mut context) {
            seen.push(queued.batch);
        }
        while (seen.len() as u64) < 2 * batches {
            seen.push(pop(&queue).0);
        }
        for first in [0, 100] {
            let of_one = seen.iter().copied().filter(|batch| batch / 100 == first / 100);
            assert!(of_one.eq(first..first + batches), "{seen:?}");
        }
        drivers.into_iter().for_each(|driver| driver.join().unwrap());
    })
}

/// Whoever takes a cluster map after each report has the newest one in the end, however many were
/// replaced meanwhile.
pub fn the_newest_cluster_map_is_taken(maps: u8) -> usize {
    explore(move || {
        let shared = Arc::new(SharedState::default());
        let (reports, reported) = mpsc::channel();
        let connection = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                for map in 1..=maps {
                    if shared.offer_map(Bytes::copy_from_slice(&[map])) {
                        reports.send(true).unwrap();
                    }
                }
                reports.send(false).unwrap();
            }
        });
        let mut seen = Vec::new();
        while reported.recv().unwrap() {
            seen.push(shared.take_map().expect("a report is of a map that nobody has taken")[0]);
        }
        assert_eq!((seen.last(), shared.take_map()), (Some(&maps), None));
        connection.join().unwrap();
    })
}

fn moved(seqno: u64) -> PositionUpdate {
    let snapshot = Snapshot { start: Seqno(0), end: Seqno(1000) };
    let position = Position { seqno: Seqno(seqno), snapshot, ..Position::EARLIEST };
    PositionUpdate { vbid: Vbid(0), position, history: History::default() }
}

fn watermark() -> Acknowledger {
    Acknowledger::new(true, &Checkpoint::new("bucket", StoredFilter::default()))
}

fn deliver(acks: &Acknowledger, shared: &Arc<SharedState>, batch: u64, seqno: u64) {
    assert!(acks.delivered(batch, &[moved(seqno)], Credit::new(Arc::clone(shared), 1)).is_none());
}

fn seqno(acks: &Acknowledger) -> u64 {
    let checkpoint = acks.checkpoint().expect("manual");
    checkpoint.position(Vbid(0)).map_or(0, |position| position.seqno.0)
}

/// Two batches are acknowledged by two threads, one of them twice: the checkpoint never includes a
/// batch before it and all before it are acknowledged, never goes back, and has both in the end; the
/// driver gets the bytes of each once.
pub fn acknowledgements_from_two_threads() -> usize {
    explore(|| {
        let (acks, shared) = (watermark(), Arc::new(SharedState::default()));
        let is_acked = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
        deliver(&acks, &shared, 1, 10);
        deliver(&acks, &shared, 2, 20);
        let other = thread::spawn({
            let (acks, is_acked) = (acks.clone(), Arc::clone(&is_acked));
            move || {
                is_acked[1].store(true, Ordering::Relaxed);
                acks.ack(acks.token(2)).unwrap();
                acks.ack(acks.token(2)).unwrap();
            }
        });
        let driver = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let mut returned = shared.take_returned();
                while returned < 2 {
                    block_on(shared.wake.notified());
                    returned += shared.take_returned();
                }
                returned
            }
        });
        assert_eq!(seqno(&acks), 0);
        is_acked[0].store(true, Ordering::Relaxed);
        acks.ack(acks.token(1)).unwrap();
        let before = seqno(&acks);
        assert!(before == 10 || is_acked[1].load(Ordering::Relaxed), "passed one not acknowledged");
        let after = seqno(&acks);
        assert!(before <= after, "back from {before} to {after}");
        other.join().unwrap();
        assert_eq!((seqno(&acks), acks.unacknowledged()), (20, 0));
        assert_eq!(driver.join().unwrap() + shared.take_returned(), 2);
    })
}

/// One thread acknowledges a batch while the stream passes a position and delivers the next batch.
pub fn an_acknowledgement_while_the_stream_goes_on() -> usize {
    explore(|| {
        let (acks, shared) = (watermark(), Arc::new(SharedState::default()));
        deliver(&acks, &shared, 1, 10);
        let application = thread::spawn({
            let acks = acks.clone();
            move || acks.ack(acks.token(1)).unwrap()
        });
        acks.passed(&[moved(15)]);
        deliver(&acks, &shared, 2, 20);
        assert!(matches!(seqno(&acks), 0 | 15), "{}", seqno(&acks));
        application.join().unwrap();
        assert_eq!((seqno(&acks), acks.unacknowledged()), (15, 1));
        acks.ack(acks.token(2)).unwrap();
        assert_eq!((seqno(&acks), shared.take_returned()), (20, 2));
    })
}
