//! What one seed amounts to, before anything of it has run: a plan can be cut down and run again.

use dcp_test::with;
use std::time::Duration;

use dcp_consumer::{BatchPolicy, OnRollback};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Tells the dice for what was added later from those for everything else.
const APART: u64 = 0x7061_7373_776f_7264;
/// The same for members, patterns and keys.
const CHOICES: u64 = 0x6d65_6d62_6572_7321;
/// The same for replication between nodes.
const LINKS: u64 = 0x7265_706c_6963_6173;

/// Everything a world is made of.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) nodes: usize,
    pub(crate) vbuckets: u16,
    pub(crate) replicas: u8,
    pub(crate) ephemeral: bool,
    /// Nothing happens that a vBucket has to be rolled back for.
    pub(crate) calm: bool,
    /// Scope `_system` exists from the start, as it does on servers since 7.6.
    pub(crate) system_scope: bool,
    /// Collections that come and go are there from the start.
    pub(crate) collections: bool,
    /// The bucket keeps every version.
    pub(crate) history: bool,
    /// Some reader keeps no snapshots in its positions and relies on what is on all disks: a
    /// vBucket is not taken back by hand below that, which no failover does.
    pub(crate) trusts_disks: bool,
    pub(crate) readers: Vec<ReaderPlan>,
    pub(crate) steps: Vec<Step>,
}

/// One reader.
#[derive(Clone, Debug)]
pub(crate) struct ReaderPlan {
    /// Its number, which stays when others are left out.
    pub(crate) number: u64,
    pub(crate) kind: ReaderKind,
    /// Readers with the same number share a client.
    pub(crate) client: u64,
    pub(crate) filter: FilterPlan,
    /// Every version is asked for.
    pub(crate) history: bool,
    /// Only keys that begin with `key-1` are asked for.
    pub(crate) some_keys: bool,
    pub(crate) system_documents: bool,
    pub(crate) xattrs: bool,
    pub(crate) compressed: bool,
    pub(crate) batch: BatchPolicy,
    pub(crate) noop_interval: Duration,
    pub(crate) on_rollback: OnRollback,
    pub(crate) manual: bool,
    pub(crate) persisted_only: bool,
    /// First loads come without deletions.
    pub(crate) skips_deletions: bool,
    pub(crate) keeps_connections: bool,
    /// Milliseconds between batches, at most.
    pub(crate) slowness: u64,
    /// How often what was read is stored.
    pub(crate) commits: f64,
}

/// What a reader does with the changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ReaderKind {
    /// An endless stream from the beginning, or from what was stored.
    Endless,
    /// The same twice over, with one place to store for both.
    Rivals,
    /// Several processes with a share of the vBuckets each, and one place to store for all. How many
    /// there are is drawn anew whenever they start.
    Members,
    /// An endless stream of what is written from now on.
    Latest,
    /// Finite streams, one after the other.
    Finite,
    /// Micro-batches, with a driver and tasks.
    Batches,
}

/// Which documents a reader asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FilterPlan {
    All,
    /// Scope `shop`.
    Scope,
    /// `shop.orders` and `shop.carts`.
    Collections,
    /// `*.orders` and `*.not?s`.
    Patterns,
}

impl FilterPlan {
    /// Whether a collection is asked for, where ids do not decide that.
    pub(crate) fn holds(self, scope: &str, name: &str) -> bool {
        match self {
            Self::All | Self::Collections => true,
            Self::Scope => scope == "shop",
            Self::Patterns => scope != "_system" && matches!(name, "orders" | "notes"),
        }
    }
}

/// Something that happens, and the pause after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) kind: Kind,
    /// What its details are drawn from, so that a step is the same whatever came before it.
    pub(crate) dice: u64,
    pub(crate) pause: Duration,
}

macro_rules! kinds {
    ($($name:ident $weight:literal $calm:literal),+ $(,)?) => {
        /// What may happen.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Kind { $($name),+ }

        impl Kind {
            /// All, with how often they happen and whether they do in a calm world.
            pub(crate) const ALL: &[(Self, u32, bool)] = &[$((Self::$name, $weight, $calm)),+];
        }
    };
}

kinds! {
    // Writes.
    Write 40 true,
    WriteHot 12 true,
    WriteSystem 6 true,
    // Persistence and copies.
    Persist 5 true,
    HoldPersistence 6 true,
    ReplicaLag 9 true,
    Purge 3 false,
    PurgeWhileAway 3 false,
    // Histories that are cut back.
    LoseTail 5 false,
    Rewrite 6 false,
    FailOver 8 false,
    RewriteAndFailOver 5 false,
    FailOverGracefully 3 true,
    FailOverUnsafely 2 false,
    Kill 5 false,
    RestartCleanly 4 true,
    RestartUncleanly 5 false,
    Repair 10 true,
    // Where vBuckets lie.
    Move 8 true,
    Rebalance 4 true,
    AddNode 2 true,
    TakeNodeOut 3 true,
    // Collections and buckets.
    CreateCollection 6 true,
    DropCollection 5 true,
    FlushCollection 3 true,
    CreateSystemScope 2 true,
    RecreateBucket 1 false,
    // Links.
    Cut 6 true,
    CutAfter 5 true,
    CutAll 2 true,
    HalfOpen 3 true,
    Slow 3 true,
    OneByte 3 true,
    Latency 2 true,
    Repeat 2 true,
    ProxyCloses 3 true,
    InterruptBackfill 7 false,
    // What nodes answer.
    NotMyVbucketStorm 3 true,
    StateChangedAndClosed 4 true,
    BucketGone 2 true,
    AccessDenied 2 true,
    StatRefused 2 true,
    CredentialsRefused 2 true,
    StaleMap 3 true,
    Busy 2 true,
    ForgedRollback 2 false,
    Truncated 1 true,
    NoopsLost 1 true,
    // Readers.
    KillReader 8 true,
    TearCheckpoint 4 true,
    OldCheckpoint 3 true,
    LoseCheckpoint 2 true,
    PauseReader 3 true,
    // Not drawn with the others: see `add_apart`.
    ChangePassword 0 true,
    Quiet 0 true,
    // Replication between nodes: see `add_link_faults`.
    ReplicationCut 0 true,
    ReplicationSilent 0 true,
    ReplicationLag 0 true,
    ReplicationWindow 0 true,
}

impl Kind {
    /// Steps that take back what is on all disks: an operator's doing, outside of what
    /// `persisted_only` promises, so that worlds whose micro-batches rely on it
    /// ([`Plan::trusts_disks`]) leave them out.
    pub(crate) const BY_HAND: [Self; 4] =
        [Self::LoseTail, Self::Rewrite, Self::InterruptBackfill, Self::ForgedRollback];

    /// Whether a vBucket may lose changes by the step.
    pub(crate) fn may_lose(self) -> bool {
        let in_calm = |(kind, _, in_calm): &(Self, u32, bool)| *kind == self && *in_calm;
        // A node that comes back may have been killed.
        self == Self::Repair || !Self::ALL.iter().any(in_calm)
    }

    /// Faults of the connections that feed replicas.
    pub(crate) const OF_REPLICATION: [Self; 4] = [
        Self::ReplicationCut,
        Self::ReplicationSilent,
        Self::ReplicationLag,
        Self::ReplicationWindow,
    ];

    fn any(calm: bool, trusts_disks: bool, rng: &mut StdRng) -> Self {
        let weight = |(kind, weight, in_calm): &(Self, u32, bool)| {
            let is_out = calm && !in_calm || trusts_disks && Self::BY_HAND.contains(kind);
            if is_out { 0 } else { *weight }
        };
        Self::ALL.choose_weighted(rng, weight).map_or(Self::Write, |(kind, ..)| *kind)
    }
}

impl Plan {
    /// The plan of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let ephemeral = rng.random_bool(0.1);
        // A node without a disk loses what it has with every restart.
        let calm = rng.random_bool(0.15) && !ephemeral;
        let pause = |rng: &mut StdRng| match rng.random_range(0..60) {
            // Longer than it takes until a stream that stands still is told of.
            0 => rng.random_range(60_000..140_000),
            1..3 => rng.random_range(0..6000),
            3..24 => rng.random_range(0..30),
            _ => rng.random_range(0..400),
        };
        let readers = 0..rng.random_range(1..=3);
        let shared = rng.random_bool(0.3);
        let mut readers: Vec<_> =
            readers.map(|number| ReaderPlan::new(number, shared, rng)).collect();
        // Apart from everything else, so that a seed keeps its plan.
        let apart = &mut StdRng::seed_from_u64(!seed);
        for reader in readers.iter_mut().filter(|of| of.kind == ReaderKind::Batches) {
            reader.filter = match apart.random_range(0..10) {
                0..4 => FilterPlan::Collections,
                4 => FilterPlan::Scope,
                _ => FilterPlan::All,
            };
        }
        let trusts_disks = !ephemeral
            && readers.iter().any(|of| of.kind == ReaderKind::Batches && of.persisted_only);
        let step = |rng: &mut StdRng| Step {
            kind: Kind::any(calm, trusts_disks, rng),
            dice: rng.random(),
            pause: Duration::from_millis(pause(rng)),
        };
        let mut plan = Self {
            seed,
            nodes: rng.random_range(1..=4),
            vbuckets: *[1, 1, 2, 3, 5, 8].choose(rng).unwrap_or(&1),
            replicas: rng.random_range(0..=2),
            ephemeral,
            calm,
            system_scope: rng.random_bool(0.5),
            collections: rng.random_bool(0.6),
            history: false,
            trusts_disks,
            readers,
            steps: (0..rng.random_range(8..50)).map(|_| step(rng)).collect(),
        };
        plan.add_apart();
        plan.add_choices();
        plan.add_link_faults();
        plan
    }

    /// Lets the password change in some worlds, and some be quiet for a while. Drawn apart, so that
    /// what else a seed amounts to stays what it was.
    fn add_apart(&mut self) {
        let rng = &mut StdRng::seed_from_u64(self.seed ^ APART);
        let passwords = if rng.random_bool(0.2) { rng.random_range(1..=2) } else { 0 };
        let quiet = u32::from(rng.random_bool(0.25));
        let kinds =
            [(Kind::ChangePassword, passwords, 0..20_000), (Kind::Quiet, quiet, 8000..20_000)];
        for (kind, times, pause) in kinds {
            for _ in 0..times {
                let pause = Duration::from_millis(rng.random_range(pause.clone()));
                let step = Step { kind, dice: rng.random(), pause };
                self.steps.insert(rng.random_range(0..=self.steps.len()), step);
            }
        }
    }

    /// Lets some endless readers of whole scopes be groups of members, some choose collections by
    /// pattern or keys, and some read the history of a bucket that keeps it; drawn apart as well.
    fn add_choices(&mut self) {
        let rng = &mut StdRng::seed_from_u64(self.seed ^ CHOICES);
        self.history = rng.random_bool(0.3) && !self.ephemeral;
        for reader in &mut self.readers {
            let (members, patterns, keys) =
                (rng.random_bool(0.4), rng.random_bool(0.3), rng.random_bool(0.15));
            let is_whole = reader.filter != FilterPlan::Collections;
            if members && reader.kind == ReaderKind::Endless && is_whole {
                reader.kind = ReaderKind::Members;
            }
            if patterns && reader.kind != ReaderKind::Batches && reader.filter == FilterPlan::All {
                reader.filter = FilterPlan::Patterns;
            }
            let is_finite = matches!(reader.kind, ReaderKind::Batches | ReaderKind::Finite);
            reader.some_keys = keys && !is_finite;
            reader.history = self.history && rng.random_bool(0.6);
        }
    }

    /// Disturbs replication in half of the worlds that have any; drawn apart as well.
    fn add_link_faults(&mut self) {
        let rng = &mut StdRng::seed_from_u64(self.seed ^ LINKS);
        if self.nodes == 1 || self.replicas == 0 || rng.random_bool(0.5) {
            return;
        }
        for _ in 0..rng.random_range(1..=5) {
            let kind = *Kind::OF_REPLICATION.choose(rng).unwrap_or(&Kind::ReplicationCut);
            let pause = Duration::from_millis(rng.random_range(0..400));
            let step = Step { kind, dice: rng.random(), pause };
            self.steps.insert(rng.random_range(0..=self.steps.len()), step);
        }
    }

    /// The same without some kinds of steps, which are named as in [`Kind`].
    pub(crate) fn without(mut self, kinds: &str) -> Self {
        let is_out = |step: &Step| {
            let name = format!("{:?}", step.kind);
            kinds.split(',').any(|kind| kind == name)
        };
        self.steps.retain(|step| !is_out(step));
        self
    }
}

impl ReaderPlan {
    fn new(number: u64, shared: bool, rng: &mut StdRng) -> Self {
        use ReaderKind::{Batches, Endless, Finite, Latest, Rivals};
        let kinds = [Endless, Endless, Endless, Rivals, Latest, Finite, Finite, Batches, Batches];
        let kind = *kinds.choose(rng).unwrap_or(&Endless);
        let filters = [FilterPlan::All, FilterPlan::All, FilterPlan::All, FilterPlan::Scope];
        let rollback = rng.random_range(0..10);
        Self {
            number,
            kind,
            client: if shared { 0 } else { number },
            filter: match rng.random_bool(0.25) {
                _ if kind == Batches => FilterPlan::All,
                true => FilterPlan::Collections,
                false => *filters.choose(rng).unwrap_or(&FilterPlan::All),
            },
            history: false,
            some_keys: false,
            system_documents: rng.random_bool(0.3),
            xattrs: rng.random_bool(0.3),
            compressed: rng.random_bool(0.3),
            batch: with(BatchPolicy::default(), |o| {
                o.max_rows = *[1, 3, 20, 10_000].choose(rng).unwrap_or(&1);
                o.linger = Duration::from_millis(rng.random_range(0..50));
            }),
            noop_interval: Duration::from_secs(rng.random_range(1..10)),
            on_rollback: match rollback {
                0..7 => OnRollback::Emit,
                _ if kind == Batches => OnRollback::Resync,
                7..9 => OnRollback::Resync,
                _ => OnRollback::Fail,
            },
            manual: rng.random_bool(0.4),
            persisted_only: rng.random_bool(if kind == Batches { 0.7 } else { 0.3 }),
            skips_deletions: !matches!(kind, Batches | Latest) && rng.random_bool(0.4),
            keeps_connections: rng.random_bool(0.3),
            slowness: *[0, 0, 30, 400].choose(rng).unwrap_or(&0),
            commits: rng.random_range(0.1..1.0),
        }
    }
}
