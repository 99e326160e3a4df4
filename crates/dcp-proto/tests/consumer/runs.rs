//! Mutations that are taken in runs come to the same as those taken one by one.

use dcp_wire::message::{Deletion, Mutation, OsoSnapshot, StreamAddress};
use dcp_wire::{Header, Magic, Opaque, Opcode, Seqno, Vbuuid};
use proptest::collection::vec;
use proptest::prelude::*;

use dcp_proto::consumer::{ConnectionConfig, Delivery, Exclusions, Limit, StreamPosition};
use dcp_proto::{Change, ChangeSink, MutationRun, Position, Rollback, RunError, SinkError};
use dcp_test::harness::*;

/// What the server sends next, after what it has sent.
#[derive(Clone, Copy, Debug)]
enum Next {
    Marker {
        len: u64,
    },
    Mutation {
        ahead: u64,
        value_len: usize,
        hidden: bool,
    },
    Deletion,
    Advanced {
        ahead: u64,
    },
    Oso(bool),
    /// Of a stream that is gone.
    Stale,
}

fn next() -> impl Strategy<Value = Next> {
    prop_oneof![
        4 => (0u64..100).prop_map(|len| Next::Marker { len }),
        60 => (
            prop_oneof![200 => Just(1u64), 20 => 2u64..5, 1 => Just(0)],
            0usize..90,
            prop_oneof![9 => Just(false), 1 => Just(true)],
        )
            .prop_map(|(ahead, value_len, hidden)| Next::Mutation { ahead, value_len, hidden }),
        2 => Just(Next::Deletion),
        1 => prop_oneof![9 => Just(Next::Stale), 1 => any::<bool>().prop_map(Next::Oso)],
        1 => (0u64..3).prop_map(|ahead| Next::Advanced { ahead }),
        1 => Just(Next::Stale),
    ]
}

/// Puts a script on the wire.
fn send(script: &[Next], harness: &mut Harness) {
    let (mut seqno, mut end, mut snapshot) = (0, 0, 40);
    for next in script {
        let ahead = match *next {
            Next::Mutation { ahead, .. } | Next::Advanced { ahead } => ahead,
            Next::Deletion => 1,
            _ => 0,
        };
        if seqno + ahead > end {
            harness.marker(end + 1, end + 5 + snapshot);
            (seqno, end) = (end, end + 5 + snapshot);
        }
        match *next {
            Next::Marker { len } => {
                harness.marker(end + 1, end + 1 + len);
                (seqno, end, snapshot) = (end, end + 1 + len, len);
            }
            Next::Mutation { ahead, value_len, hidden } => {
                seqno += ahead;
                mutation(harness, harness.opaque, seqno, value_len, hidden);
            }
            Next::Stale => mutation(harness, Opaque(harness.opaque.0 + 1), seqno + 1, 5, false),
            Next::Deletion => {
                seqno += 1;
                let to = StreamAddress { vbid: VB, opaque: harness.opaque, stream_id: None };
                let deletion = Deletion { seqno: Seqno(seqno), key: b"key", ..Default::default() };
                deletion.encode(to, &mut harness.wire).unwrap();
            }
            Next::Advanced { ahead } => {
                seqno += ahead;
                harness.advanced(seqno);
            }
            Next::Oso(true) => {
                harness.oso(OsoSnapshot::Start);
            }
            Next::Oso(false) => {
                harness.oso(OsoSnapshot::End);
            }
        }
    }
}

fn mutation(harness: &mut Harness, opaque: Opaque, seqno: u64, value_len: usize, hidden: bool) {
    let mutation = Mutation {
        seqno: Seqno(seqno.max(1)),
        key: if hidden { b"_txn:record" } else { b"key" },
        value: &vec![b'x'; value_len],
        ..Default::default()
    };
    let to = StreamAddress { vbid: VB, opaque, stream_id: None };
    mutation.encode(to, &mut harness.wire).unwrap();
}

/// The same packets, with mutations in a form that no run takes: with framing extras, of length 0.
fn one_by_one(wire: &[u8]) -> Vec<u8> {
    let mut wire = wire.to_vec();
    let mut at = 0;
    while at < wire.len() {
        let header = Header::decode(wire[at..].first_chunk().unwrap()).unwrap();
        if header.opcode == Opcode::DCP_MUTATION {
            wire[at] = Magic::ALT_CLIENT_REQUEST.0;
        }
        at += header.packet_len();
    }
    wire
}

/// Everything that can be seen of a connection.
fn seen(harness: &mut Harness) -> String {
    let Harness { machine, sink, .. } = harness;
    let positions = machine.take_positions();
    let events: Vec<_> = std::iter::from_fn(|| machine.poll_event()).collect();
    let bytes = (machine.take_held(), machine.unacknowledged(), machine.is_window_full());
    let (items, stats) = (std::mem::take(&mut sink.items), *machine.stats());
    format!("{items:?}\n{positions:?}\n{events:?}\n{bytes:?}\n{stats:?}\n{:?}", harness.sent())
}

/// Feeds the bytes, at most `limit` rows at a time; what was seen, and how it ended.
fn feed(harness: &mut Harness, wire: &[u8], limit: Limit, release: bool) -> Vec<String> {
    let mut said = Vec::new();
    let mut rest = wire;
    loop {
        match harness.machine.handle_input(harness.now, rest, limit, &mut harness.sink) {
            Ok(walk) => {
                rest = &rest[walk.consumed..];
                let held = harness.machine.held();
                said.push(format!("{walk:?}\n{}", seen(harness)));
                if release {
                    harness.machine.release(harness.now, held);
                }
                if !walk.limited {
                    return said;
                }
            }
            Err(error) => {
                // What was given before it stays good; nobody looks at the window any more.
                said.push(format!("{error:?} {:?}", harness.sink.items));
                said.push(format!("{:?}", harness.machine.take_positions()));
                return said;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn runs_come_to_the_same_as_one_by_one(
        script in vec(next(), 1..200),
        limit in prop_oneof![Just(Limit::NONE), (1usize..100, 1usize..9000).prop_map(
            |(rows, bytes)| Limit { rows, bytes },
        )],
        (window, release) in (prop_oneof![Just(0u32), 200u32..9000], any::<bool>()),
        (collections, clamp, exclude) in (any::<bool>(), any::<bool>(), any::<bool>()),
        (end, refuse) in (
            prop_oneof![Just(u64::MAX), 1u64..120],
            prop_oneof![4 => Just(None), 1 => (1u64..100).prop_map(Some)],
        ),
        branch in 1u64..100,
    ) {
        let exclusions = if exclude { Exclusions::default().with_transactions() } else { Exclusions::default() };
        let config = ConnectionConfig {
            window,
            // A key begins with its collection then, one with a long id.
            collections: collections && !exclude,
            delivery: Delivery { clamp, exclusions, ..Delivery::default() },
            ..config()
        };
        let [mut runs, mut singles] = [(); 2].map(|()| {
            let mut harness = Harness::new(config.clone());
            harness.sink.refuse = refuse.map(Seqno);
            harness.open_until(StreamPosition::new(Position::EARLIEST), Seqno(end));
            harness.accept(&[(2, branch), (1, 0)]);
            harness
        });
        send(&script, &mut runs);
        let wire = std::mem::take(&mut runs.wire);
        let single_wire = one_by_one(&wire);
        let expected = feed(&mut singles, &single_wire, limit, release);
        prop_assert_eq!(feed(&mut runs, &wire, limit, release), expected);
    }
}

#[test]
fn run_that_the_sink_cannot_take_counts_up_to_there() {
    let mut harness = Harness::streaming(config());
    harness.sink.refuse = Some(Seqno(40));
    harness.marker(1, 100).mutations(1..=90);
    let error = harness.try_play().unwrap_err();
    assert!(matches!(
        error,
        dcp_proto::consumer::ConnectionError::Sink(SinkError::Unrepresentable {
            seqno: Seqno(40),
            ..
        })
    ));
    assert_eq!(harness.seqnos(), (1..40).collect::<Vec<_>>());
    assert_eq!(harness.moved().unwrap().seqno, Seqno(39));
}

/// Takes runs whole, and notes the seqnos of each.
#[derive(Debug, Default)]
struct Runs {
    runs: Vec<Vec<u64>>,
    alone: Vec<u64>,
}

impl ChangeSink for Runs {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        self.alone.push(change.seqno.0);
        Ok(())
    }

    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError> {
        panic!("{rollback:?}")
    }

    fn mutations(&mut self, run: &MutationRun<'_, '_>) -> Result<(), RunError> {
        self.runs.push(run.mutations.iter().map(|mutation| mutation.seqno().0).collect());
        Ok(())
    }
}

impl Runs {
    /// What the sink is given of the queued bytes.
    fn of(harness: &mut Harness, limit: Limit) -> Self {
        let mut sink = Self::default();
        let mut rest = &std::mem::take(&mut harness.wire)[..];
        loop {
            let walk = harness.machine.handle_input(harness.now, rest, limit, &mut sink).unwrap();
            rest = &rest[walk.consumed..];
            if !walk.limited {
                return sink;
            }
        }
    }
}

#[test]
fn mutations_in_a_row_are_one_run() {
    let of = |harness: &mut Harness, rows| {
        let Runs { runs, alone } = Runs::of(harness, Limit { rows, ..Limit::NONE });
        (runs, alone)
    };
    // The first change of a snapshot and the last are handled alone.
    let mut harness = Harness::streaming(config());
    harness.marker(0, 9).mutations([1, 2]).deletion(3, None).mutations([4, 6, 8, 9]);
    assert_eq!(of(&mut harness, 100), (vec![vec![2], vec![4, 6, 8]], vec![1, 3, 9]));
    let mut harness = Harness::streaming(config());
    harness.marker(0, 9).mutations(1..=7);
    assert_eq!(of(&mut harness, 3), (vec![vec![2, 3], vec![4, 5, 6], vec![7]], vec![1]));
    // What comes late of a stream that is gone ends a run, and is no part of it.
    let mut harness = Harness::streaming(config());
    harness.marker(0, 9).mutations(1..=2);
    let gone = Opaque(harness.opaque.0 + 1);
    mutation(&mut harness, gone, 3, 5, false);
    harness.mutations(3..=4);
    assert_eq!(of(&mut harness, 100), (vec![vec![2], vec![3, 4]], vec![1]));
    // A run has a longest length; the next follows it at once.
    let mut harness = Harness::streaming(config());
    harness.marker(0, 999).mutations(1..=500);
    let (runs, alone) = of(&mut harness, 9999);
    assert_eq!((runs.concat(), alone), ((2..=500).collect(), vec![1]));
    assert!(runs.len() > 1 && runs.iter().all(|run| run.len() <= runs[0].len()));
}

#[test]
fn changes_that_were_unpersisted_are_one_run_up_to_what_is_persisted() {
    let delivery = Delivery { persisted_only: true, ..Delivery::default() };
    let mut harness = Harness::streaming(ConnectionConfig { delivery, ..config() });
    harness.marker(0, 9).mutations(1..=7);
    let mut given = vec![Runs::of(&mut harness, Limit::NONE).runs];
    for persisted in [5, 8] {
        harness.machine.persisted(VB, Vbuuid(1), Seqno(persisted));
        given.push(Runs::of(&mut harness, Limit::NONE).runs);
    }
    // It is persisted already.
    harness.mutation(8);
    given.push(Runs::of(&mut harness, Limit::NONE).runs);
    assert_eq!(given, [vec![], vec![vec![2, 3, 4, 5]], vec![vec![6, 7]], vec![vec![8]]]);
}
