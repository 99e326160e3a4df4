//! One step of a world: something is written, or goes wrong.

use std::sync::Arc;
use std::time::Duration;

use dcp_producer::VBucketState;
use dcp_wire::{Seqno, Vbid};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use tokio::time::sleep;

use crate::plan::{Kind, ReaderKind, Step};
use crate::run::Run;
use crate::world::DEFAULT;

/// Nodes refuse all streams for a while.
const BUSY: &str = r#"[{"condition": {"opcode": "DCP_STREAM_REQ"},
    "reaction": {"answer": {"status": "ETMPFAIL"}}}]"#;

impl Run {
    /// Takes a step; tells what became of it.
    pub(crate) async fn step(&mut self, step: Step) -> String {
        let mut rng = StdRng::seed_from_u64(step.dice);
        let rng = &mut rng;
        self.shared.world.borrow_mut().tick();
        let restarts = [Kind::RestartCleanly, Kind::TakeNodeOut].contains(&step.kind);
        // A node without a disk loses what it has with every restart.
        let may_lose = step.kind.may_lose() || self.plan.ephemeral && restarts;
        self.shared.world.borrow_mut().losses += u32::from(may_lose);
        let makes_copies =
            [Kind::Rebalance, Kind::Repair, Kind::AddNode, Kind::Move, Kind::TakeNodeOut];
        if self.plan.trusts_disks && makes_copies.contains(&step.kind) {
            // A real cluster lets a copy into the map once it has everything.
            self.shared.world.borrow_mut().mend_replication();
            self.shared.world.borrow().catch_up();
        }
        let told = match step.kind {
            Kind::Write
            | Kind::WriteHot
            | Kind::WriteSystem
            | Kind::Persist
            | Kind::HoldPersistence
            | Kind::ReplicaLag
            | Kind::Purge => self.write(step.kind, rng),
            Kind::LoseTail if rng.random_bool(0.4) => self.lose_what_is_asked_for(rng).await,
            Kind::LoseTail | Kind::Rewrite => self.lose_tail(step.kind == Kind::Rewrite, rng),
            Kind::FailOver
            | Kind::FailOverGracefully
            | Kind::FailOverUnsafely
            | Kind::Kill
            | Kind::Move
            | Kind::Rebalance => self.change_nodes(step.kind, rng),
            Kind::RewriteAndFailOver => self.rewrite_and_fail_over(rng).await,
            Kind::RestartCleanly => self.restart(rng, true).await,
            Kind::RestartUncleanly => self.restart(rng, false).await,
            Kind::Repair => self.repair(rng).await,
            Kind::AddNode => self.add_node().await,
            Kind::TakeNodeOut => self.take_node_out(rng),
            Kind::CreateCollection => self.shared.world.borrow_mut().create_collection(rng),
            Kind::DropCollection => self.shared.world.borrow_mut().drop_collection(rng),
            Kind::FlushCollection => self.shared.world.borrow_mut().flush_collection(rng),
            Kind::CreateSystemScope => {
                format!("{}", self.shared.world.borrow_mut().create_system_scope())
            }
            Kind::RecreateBucket => self.recreate_bucket(rng).await,
            Kind::KillReader
            | Kind::TearCheckpoint
            | Kind::OldCheckpoint
            | Kind::LoseCheckpoint
            | Kind::PauseReader => self.disturb_reader(step.kind, rng).await,
            Kind::InterruptBackfill => self.interrupt_backfill(rng).await,
            Kind::PurgeWhileAway => self.purge_while_away(rng).await,
            Kind::ChangePassword => self.change_password(rng),
            Kind::Quiet => self.be_quiet(rng),
            Kind::StateChangedAndClosed => self.change_state_and_close(rng).await,
            kind if Kind::OF_REPLICATION.contains(&kind) => self.disturb_replication(kind, rng),
            _ if self.break_link(step.kind, rng) => String::new(),
            _ => self.misbehave(step.kind, rng),
        };
        // A vBucket taken back by hand loses what is on every disk.
        let keeps_promises =
            !Kind::BY_HAND.contains(&step.kind) && step.kind != Kind::RecreateBucket;
        self.shared.world.borrow_mut().observe(keeps_promises);
        self.shared.world.borrow_mut().losses += u32::from(may_lose);
        format!("{:?}: {told}", step.kind)
    }

    fn write(&self, kind: Kind, rng: &mut StdRng) -> String {
        let mut world = self.shared.world.borrow_mut();
        let vbid = world.any_vbid(rng);
        let copy = rng.random_range(0..3);
        match kind {
            Kind::Write => world.write(rng.random_range(1..30), 24, rng),
            Kind::WriteHot => world.write(rng.random_range(1..30), 3, rng),
            Kind::WriteSystem => world.write_system(rng.random_range(1..6), rng),
            Kind::Persist => world.producer.persist(),
            Kind::HoldPersistence => {
                let hold = rng.random_bool(0.6);
                let done = world.producer.hold_persistence(vbid, copy, hold).is_ok();
                return format!("{vbid} copy {copy}, {hold}: {done}");
            }
            Kind::ReplicaLag => {
                let lag = [None, Some(0), Some(3), Some(10)][rng.random_range(0..4)];
                let done = world.producer.set_replica_lag(vbid, copy, lag).is_ok();
                return format!("{vbid} replica {copy}, {lag:?}: {done}");
            }
            _ => {
                let high = world.producer.high_seqnos().get(&vbid).copied().unwrap_or_default();
                return format!("{vbid} to {high}: {}", world.producer.purge(vbid, high).is_ok());
            }
        }
        String::new()
    }

    /// A vBucket loses the newest of its changes; some come in their place, maybe as many.
    fn lose_tail(&self, rewrites: bool, rng: &mut StdRng) -> String {
        let mut world = self.shared.world.borrow_mut();
        let vbid = world.any_vbid(rng);
        let high = world.producer.high_seqnos().get(&vbid).copied().unwrap_or_default().0;
        let lost = rng.random_range(0..=high.min(if rewrites { 6 } else { high / 2 }));
        let done = world.producer.roll_back(vbid, Seqno(high - lost)).is_ok();
        world.observe(false);
        if rewrites {
            // A vBucket that lost collections has them again, which takes seqnos.
            let now = world.producer.high_seqnos().get(&vbid).copied().unwrap_or_default().0;
            world.write_to(vbid, high.saturating_sub(now), rng);
        }
        format!("{vbid}, {lost} of {high}: {done}")
    }

    /// Readers have seen where to end, and what they ask for is lost before nodes let them have it.
    async fn lose_what_is_asked_for(&mut self, rng: &mut StdRng) -> String {
        for reader in self.readers.iter_mut().filter(|of| of.plan.kind == ReaderKind::Finite) {
            reader.kill().await;
        }
        let (vbid, had) = {
            let mut world = self.shared.world.borrow_mut();
            let vbid = world.any_vbid(rng);
            let had = world.producer.high_seqnos().get(&vbid).copied().unwrap_or_default().0;
            // So much that it takes a while until there is as much again.
            world.write_to(vbid, 80, rng);
            world.misbehave(BUSY, Duration::from_millis(rng.random_range(200..2000)));
            (vbid, had)
        };
        self.readers.iter_mut().for_each(|reader| {
            if reader.plan.kind == ReaderKind::Finite {
                reader.start();
            }
        });
        sleep(Duration::from_millis(rng.random_range(20..400))).await;
        // Nobody who was there before has anything of what is lost.
        let left = had + rng.random_range(0..8);
        let mut world = self.shared.world.borrow_mut();
        let done = world.producer.roll_back(vbid, Seqno(left)).is_ok();
        world.observe(false);
        format!("{vbid} back to {left} while streams are refused: {done}")
    }

    fn change_nodes(&self, kind: Kind, rng: &mut StdRng) -> String {
        let mut world = self.shared.world.borrow_mut();
        let node = world.any_node(rng);
        let vbid = world.any_vbid(rng);
        let producer = Arc::clone(&world.producer);
        let done = match kind {
            // Its only copies would go with it.
            Kind::FailOverGracefully if world.is_calm && !has_two_of_each(&producer) => false,
            Kind::FailOver => producer.failover(node, false).is_ok(),
            Kind::FailOverGracefully => producer.failover(node, true).is_ok(),
            Kind::FailOverUnsafely => producer.failover_unsafely(&[node]).is_ok(),
            Kind::Kill => producer.kill(node).is_ok(),
            Kind::Move => producer.move_vbucket(vbid, node).is_ok(),
            _ => producer.rebalance().is_ok(),
        };
        let breaks = [Kind::FailOver, Kind::FailOverGracefully, Kind::FailOverUnsafely, Kind::Kill];
        if done && breaks.contains(&kind) && !world.broken.contains(&node) {
            world.broken.push(node);
        }
        format!("node {node}, {vbid}: {done}")
    }

    /// Documents are written again while reads of their first versions are planned and run, the last
    /// of them where no replica gets it. Then a replica takes over that has everything but that, and
    /// with it the first version of that document.
    async fn rewrite_and_fail_over(&self, rng: &mut StdRng) -> String {
        let (vbid, producer, mut keys, collection) = {
            let world = self.shared.world.borrow();
            let vbid = world.any_vbid(rng);
            let shop: Vec<u32> = world.live(|of| of.scope == "shop").into_iter().collect();
            let collection = shop.choose(rng).copied().filter(|_| rng.random_bool(0.5));
            (vbid, Arc::clone(&world.producer), world.keys_of(vbid), collection.unwrap_or(DEFAULT))
        };
        let copies = producer.copies_of(vbid).unwrap_or_default();
        if copies.len() < 2 || keys.len() < 2 {
            return format!("{vbid} has no replica, or nothing to write");
        }
        keys.shuffle(rng);
        keys.truncate(rng.random_range(2..5));
        let (last, others) = keys.split_last().expect("two keys");
        let write = |keys: &[Vec<u8>], rng: &mut StdRng| {
            self.shared.world.borrow_mut().write_each(collection, keys, rng);
            producer.persist();
        };
        self.shared.world.borrow().catch_up();
        producer.persist();
        // Readers have everything else meanwhile, and plan to read just these.
        sleep(Duration::from_millis(rng.random_range(0..2000))).await;
        write(&keys, rng);
        sleep(Duration::from_millis(rng.random_range(20..600))).await;
        write(others, rng);
        sleep(Duration::from_millis(rng.random_range(0..100))).await;
        for replica in 1..copies.len() {
            // Refused if it is gone meanwhile.
            let _ = producer.set_replica_lag(vbid, replica, None);
        }
        write(std::slice::from_ref(last), rng);
        sleep(Duration::from_millis(rng.random_range(0..1000))).await;
        let node = copies[0];
        let done = producer.failover(node, false).is_ok();
        let mut world = self.shared.world.borrow_mut();
        if done && !world.broken.contains(&node) {
            world.broken.push(node);
        }
        format!("{vbid} of node {node}: {done}")
    }

    async fn restart(&self, rng: &mut StdRng, cleanly: bool) -> String {
        let (node, producer) = {
            let world = self.shared.world.borrow();
            (world.any_node(rng), Arc::clone(&world.producer))
        };
        let done = producer.restart(node, cleanly).await.is_ok();
        let mut world = self.shared.world.borrow_mut();
        world.broken.retain(|broken| *broken != node);
        format!("node {node}: {done}")
    }

    /// A node that is down or out comes back, and gets its share again.
    async fn repair(&self, rng: &mut StdRng) -> String {
        let (node, producer, cleanly) = {
            let world = self.shared.world.borrow();
            if world.broken.is_empty() {
                return "nothing is broken".to_owned();
            }
            let node = world.broken[rng.random_range(0..world.broken.len())];
            let cleanly = world.is_calm || rng.random_bool(0.5);
            (node, Arc::clone(&world.producer), cleanly)
        };
        let done = producer.restart(node, cleanly).await.is_ok();
        self.shared.world.borrow_mut().broken.retain(|broken| *broken != node);
        self.shared.world.borrow_mut().observe(true);
        let rebalanced = producer.rebalance().is_ok();
        format!("node {node}, clean {cleanly}: {done}, rebalance: {rebalanced}")
    }

    async fn add_node(&self) -> String {
        let producer = Arc::clone(&self.shared.world.borrow().producer);
        if producer.num_nodes() > 4 {
            return "there are enough".to_owned();
        }
        let added = producer.add_node().await.is_ok();
        format!("{added}, rebalance: {}", producer.rebalance().is_ok())
    }

    /// As a rebalance does that takes a node out: its vBuckets go first.
    fn take_node_out(&self, rng: &mut StdRng) -> String {
        let mut world = self.shared.world.borrow_mut();
        let node = world.any_node(rng);
        let producer = Arc::clone(&world.producer);
        let Some(other) = (0..8).find(|other| {
            *other != node && !world.broken.contains(other) && *other < producer.num_nodes()
        }) else {
            return "it is the only one".to_owned();
        };
        for index in 0..producer.num_vbuckets() {
            let copies = producer.copies_of(Vbid(index)).unwrap_or_default();
            if copies.first() == Some(&node) {
                // Refused if the other is not there.
                let _ = producer.move_vbucket(Vbid(index), other);
            }
        }
        world.observe(true);
        let done = producer.failover(node, true).is_ok();
        if done {
            // It is gone from the network at once.
            let _ = producer.kill(node);
            world.broken.push(node);
        }
        format!("node {node}: {done}")
    }

    async fn recreate_bucket(&self, rng: &mut StdRng) -> String {
        let producer = Arc::clone(&self.shared.world.borrow().producer);
        if producer.drop_bucket().is_err() {
            return "there is none".to_owned();
        }
        self.shared.world.borrow_mut().end_bucket();
        let away = Duration::from_millis(rng.random_range(0..3000));
        sleep(away).await;
        producer.create_bucket().expect("there is none");
        self.shared.world.borrow_mut().begin(rng.random_bool(0.5), rng.random_bool(0.5));
        format!("another one after {away:?}")
    }

    async fn disturb_reader(&mut self, kind: Kind, rng: &mut StdRng) -> String {
        if self.readers.is_empty() {
            return "nobody reads".to_owned();
        }
        let index = rng.random_range(0..self.readers.len());
        let reader = &mut self.readers[index];
        if kind == Kind::PauseReader {
            let lasts = Duration::from_secs(*[1, 10, 100].get(index % 3).unwrap_or(&1));
            reader.pause(lasts);
            return format!("{reader} for {lasts:?}");
        }
        reader.kill().await;
        match kind {
            Kind::TearCheckpoint => reader.storage.borrow_mut().tear(rng),
            Kind::OldCheckpoint => reader.storage.borrow_mut().go_back(rng),
            Kind::LoseCheckpoint => reader.storage.borrow_mut().lose(),
            _ => {}
        }
        reader.start();
        format!("{reader}")
    }

    /// Something is written that some reader does not take, and nothing moves any more.
    fn be_quiet(&self, rng: &mut StdRng) -> String {
        let Some(reader) = self.readers.get(rng.random_range(0..self.readers.len().max(1))) else {
            return "nobody reads".to_owned();
        };
        reader.pause(Duration::from_secs(30));
        self.shared.world.borrow_mut().write(rng.random_range(10..30), 24, rng);
        format!("{reader}")
    }

    /// Readers that are far behind are sent a snapshot from disk, lose their connections inside of
    /// it, and go on after a vBucket has lost the end of that snapshot.
    async fn interrupt_backfill(&mut self, rng: &mut StdRng) -> String {
        for reader in &mut self.readers {
            reader.kill().await;
        }
        self.shared.world.borrow_mut().write(80, 24, rng);
        self.shared.world.borrow().producer.persist();
        self.readers.iter_mut().for_each(crate::readers::Reader::start);
        sleep(Duration::from_millis(rng.random_range(5..60))).await;
        for _ in 0..3 {
            self.shared.network.cut(rng.random_range(1..20_000), rng);
        }
        if rng.random_bool(0.3) {
            // What readers are in the middle of loses deletions that were still to come.
            self.purge();
        }
        sleep(Duration::from_millis(rng.random_range(0..400))).await;
        self.lose_tail(false, rng)
    }

    /// While nobody reads, documents are removed and the nodes forget that there were any.
    async fn purge_while_away(&mut self, rng: &mut StdRng) -> String {
        for reader in &mut self.readers {
            reader.kill().await;
        }
        self.shared.world.borrow_mut().write(40, 24, rng);
        self.purge();
        self.readers.iter_mut().for_each(crate::readers::Reader::start);
        String::new()
    }

    /// The nodes forget everything that was removed.
    fn purge(&self) {
        let world = self.shared.world.borrow();
        for (vbid, high) in world.producer.high_seqnos() {
            // Refused where no node has the vBucket.
            let _ = world.producer.purge(vbid, high);
        }
    }

    /// Streams end with "state changed", and so do their connections.
    async fn change_state_and_close(&self, rng: &mut StdRng) -> String {
        let (vbid, producer) = {
            let world = self.shared.world.borrow();
            (world.any_vbid(rng), Arc::clone(&world.producer))
        };
        let dead = producer.set_vbucket_state(vbid, VBucketState::Dead).is_ok();
        sleep(Duration::from_millis(rng.random_range(0..30))).await;
        self.shared.network.cut_all();
        sleep(Duration::from_millis(rng.random_range(0..100))).await;
        let active = dead && producer.set_vbucket_state(vbid, VBucketState::Active).is_ok();
        format!("{vbid}: {dead}, {active}")
    }

    /// The cluster takes another password from now on, and every connection has to be made again.
    /// What gives the password to clients is behind for up to some minutes.
    fn change_password(&self, rng: &mut StdRng) -> String {
        let after = Duration::from_millis(match rng.random_bool(0.5) {
            true => rng.random_range(1..2000),
            false => rng.random_range(2000..200_000),
        });
        let is_sealed = rng.random_bool(0.3);
        self.shared.world.borrow_mut().change_password(after, is_sealed);
        self.shared.network.cut_all();
        format!("known after {after:?}, sealed {is_sealed}")
    }

    /// Something happens to connections; `false` if the step is none of these.
    fn break_link(&self, kind: Kind, rng: &mut StdRng) -> bool {
        let network = &self.shared.network;
        match kind {
            Kind::Cut => network.cut(0, rng),
            Kind::CutAfter => network.cut(rng.random_range(1..5000), rng),
            Kind::CutAll => network.cut_all(),
            Kind::HalfOpen => network.freeze(rng),
            Kind::Slow => network.slow(rng.random_range(100..1500), rng),
            Kind::OneByte => network.starve(rng),
            Kind::Latency => network.set_latency([0, 2, 20, 300][rng.random_range(0..4)]),
            Kind::Repeat => network.repeat(rng),
            Kind::ProxyCloses => {
                network.close_for(Duration::from_secs(rng.random_range(1..200)));
                if rng.random_bool(0.7) {
                    network.cut_all();
                }
            }
            _ => return false,
        }
        true
    }

    /// Nodes answer and send what they should not, for a while.
    fn misbehave(&self, kind: Kind, rng: &mut StdRng) -> String {
        let short = Duration::from_millis(rng.random_range(100..5000));
        let minutes = Duration::from_secs(rng.random_range(20..200));
        let (rules, lasts) = match kind {
            Kind::NotMyVbucketStorm => (
                [
                    r#"[{"condition": {"opcode": "DCP_STREAM_REQ"},
                        "reaction": {"not_my_vbucket": {"map": true}}}]"#,
                    r#"[{"condition": {"opcode": "DCP_STREAM_REQ", "every": 2},
                        "reaction": {"not_my_vbucket": {"map": false}}}]"#,
                ][rng.random_range(0..2)],
                short,
            ),
            Kind::BucketGone => (
                r#"[{"condition": {"opcode": "SELECT_BUCKET"},
                    "reaction": {"answer": {"status": "KEY_ENOENT"}}}]"#,
                minutes,
            ),
            Kind::AccessDenied => (
                r#"[{"condition": {"opcode": "SELECT_BUCKET"},
                    "reaction": {"answer": {"status": "EACCESS"}}}]"#,
                minutes,
            ),
            Kind::CredentialsRefused => (
                r#"[{"condition": {"opcode": "SASL_AUTH"},
                    "reaction": {"answer": {"status": "AUTH_ERROR"}}}]"#,
                minutes,
            ),
            Kind::StatRefused => (
                r#"[{"condition": {"opcode": "STAT"},
                    "reaction": {"answer": {"status": "EACCESS"}}}]"#,
                minutes,
            ),
            Kind::StaleMap => (
                r#"[{"condition": {"opcode": 1, "direction": "to_client"},
                     "reaction": "drop"},
                    {"condition": {"opcode": "GET_CLUSTER_CONFIG"},
                     "reaction": {"answer": {"status": "ETMPFAIL"}}}]"#,
                short * 4,
            ),
            Kind::Busy => (
                r#"[{"condition": {"opcode": "DCP_STREAM_REQ", "every": 2},
                    "reaction": {"answer": {"status": "ETMPFAIL"}}}]"#,
                short,
            ),
            Kind::ForgedRollback => (
                r#"[{"condition": {"opcode": "DCP_STREAM_REQ", "every": 3},
                    "reaction": {"rollback": {"seqno": 5}}}]"#,
                short,
            ),
            Kind::Truncated => (
                r#"[{"condition": {"opcode": "DCP_MUTATION", "every": 20},
                    "reaction": {"truncate": {"bytes": 30}}}]"#,
                short,
            ),
            _ => (
                r#"[{"condition": {"opcode": "DCP_NOOP", "every": 3}, "reaction": "drop"}]"#,
                minutes,
            ),
        };
        self.shared.world.borrow_mut().misbehave(rules, lasts);
        let cuts = [Kind::BucketGone, Kind::AccessDenied, Kind::CredentialsRefused];
        if cuts.contains(&kind) {
            // Nobody would notice otherwise.
            self.shared.network.cut_all();
        }
        format!("for {lasts:?}")
    }
}

/// Whether every vBucket has a copy to spare.
pub(crate) fn has_two_of_each(producer: &dcp_producer::Producer) -> bool {
    let mut vbids = (0..producer.num_vbuckets()).map(Vbid);
    vbids.all(|vbid| producer.copies_of(vbid).is_ok_and(|copies| copies.len() > 1))
}
