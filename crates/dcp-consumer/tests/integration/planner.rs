//! Bounded reads that follow each other: planned as Spark's driver does, read as its tasks do.

use dcp_test::with;
use std::time::{Duration, Instant};

use bytes::Bytes;
use dcp_consumer::plan::{Planner, PlannerError, open};
use dcp_consumer::{
    Client, ConnectOptions, End, ErrorKind, Filter, Start as StreamStart, StreamEvent,
    StreamOptions,
};
use dcp_producer::{Condition, Producer, Reaction, Rule, WriteOptions};
use dcp_proto::checkpoint::Checkpoint;
use dcp_proto::plan::{Limits, Offsets, PlanError, ReadPlan, Start};
use dcp_proto::topology::vbucket_of_key;
use dcp_proto::{OnPurge, OnRollback};
use dcp_wire::{CollectionId, Opcode, Seqno, Status, Vbid};
use tokio::time::sleep;

use crate::embedded::{
    ANSWER_TIMEOUT, cluster_options, connect, keys, names, options, producer, read_all, reader,
    row, write as embedded_write,
};
use crate::rows::{Item, Rows};

const VB: Vbid = Vbid(1);

/// Reads to now, and no other read follows.
fn last() -> Limits {
    with(Limits::default(), |o| {
        o.persisted_only = true;
        o.is_last = true;
    })
}

fn followed() -> Limits {
    with(Limits::default(), |o| o.persisted_only = true)
}

async fn planner(producer: &Producer) -> Planner {
    Planner::new(&connect(producer).await, StreamOptions::default()).await.unwrap()
}

/// Some keys of one vBucket.
fn own_keys(keys: std::ops::Range<u32>) -> impl Iterator<Item = String> {
    keys_of(VB, keys)
}

fn keys_of(vbid: Vbid, keys: std::ops::Range<u32>) -> impl Iterator<Item = String> {
    let all = (0..).map(|n| format!("key-{n}"));
    let own = all.filter(move |key| vbucket_of_key(key.as_bytes(), 4) == vbid);
    own.skip(keys.start as usize).take(keys.len())
}

/// Writes keys of that vBucket.
fn write(producer: &Producer, keys: std::ops::Range<u32>) {
    write_to(producer, VB, keys);
}

fn write_to(producer: &Producer, vbid: Vbid, keys: std::ops::Range<u32>) {
    for key in keys_of(vbid, keys) {
        producer.upsert(key.as_bytes(), Bytes::from("{}"), WriteOptions::default()).unwrap();
    }
}

/// Where a stream to now stands at its end.
async fn checkpoint(producer: &Producer) -> Checkpoint {
    let client = connect(producer).await;
    let options = options(StreamStart::Earliest, End::Now);
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    read_all(&mut stream).await;
    stream.checkpoint()
}

/// Seqnos as a task reads them, and the rollbacks that were planned.
async fn read(producer: &Producer, partition: &ReadPlan) -> Result<Vec<String>, PlannerError> {
    let mut items = Vec::new();
    // As it comes to a task: from another process.
    let partition = ReadPlan::from_json(&partition.to_json()).unwrap();
    let connect = connect(producer).await.connect_options().clone();
    let base = StreamOptions::default();
    let (_client, mut stream) = open(&connect, None, &partition, &base, |_| Rows::default).await?;
    while let Some(delivered) = stream.next().await {
        items.extend(delivered?.batch.iter().map(described));
    }
    Ok(items)
}

fn described(item: &Item) -> String {
    match item {
        Item::Row(row) => row.seqno.to_string(),
        Item::Rollback(rollback) => format!("rollback to {} in {}", rollback.seqno, rollback.epoch),
    }
}

/// Plans and reads everything from `start`.
async fn batch(
    producer: &Producer,
    planner: &mut Planner,
    start: &Start,
    limits: &Limits,
) -> Result<(Vec<String>, Offsets), PlannerError> {
    let end = planner.end(start, limits).await?;
    let mut items = Vec::new();
    for partition in planner.partitions(start, &end, None, limits).await? {
        items.extend(read(producer, &partition).await?);
    }
    Ok((items, end))
}

#[tokio::test]
async fn plan_of_a_stream_is_run_in_parts_elsewhere() {
    let producer = producer(2, 4).await;
    embedded_write(&producer, 0..40);
    let client = connect(&producer).await;
    let plan = client.plan(&options(StreamStart::Earliest, End::Now)).await.unwrap();
    assert_eq!(plan.to, client.high_seqnos().await.unwrap());
    let nodes = client.vbuckets_by_node();
    let nodes = nodes
        .into_iter()
        .flat_map(|(node, vbids)| vbids.into_iter().map(move |vbid| (vbid, node.clone())));
    let parts = plan.split(&nodes.collect(), 3);
    assert_eq!(parts.len(), 3);
    let elsewhere = connect(&producer).await;
    let mut read = Vec::new();
    for part in &parts {
        let part = ReadPlan::from_json(&part.to_json()).unwrap();
        // What is read is the plan's.
        let delivery = with(StreamOptions::default(), |o| {
            o.start = StreamStart::Latest;
            o.batch.linger = Duration::from_millis(5);
        });
        let mut stream = elsewhere.run(&part, &delivery, Rows::default).await.unwrap();
        read.extend(read_all(&mut stream).await.into_iter().map(row));
        let position = |vbid| stream.checkpoint().position(vbid).map(|at| at.seqno);
        assert!(part.to.iter().all(|(&vbid, &to)| position(vbid).unwrap_or_default() == to));
    }
    assert_eq!((read.len(), keys(&read)), (40, names(0..40)));

    let foreign = ReadPlan { start: Checkpoint::new("other", plan.filter()), ..plan };
    let delivery = StreamOptions::default();
    let error = client.run(&foreign, &delivery, Rows::default).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint);
}

#[tokio::test]
async fn checkpoint_that_was_rolled_back_is_planned_as_its_stream_resumes() {
    // Fewer changes than were read, as many on another branch, and more.
    for written in [2, 5, 9] {
        let producer = producer(2, 4).await;
        write(&producer, 0..5);
        let first = checkpoint(&producer).await;
        let client = connect(&producer).await;
        write(&producer, 5..10);
        let options = options(StreamStart::Checkpoint(first), End::Now);
        let mut stream = client.stream(options.clone(), Rows::default).await.unwrap();
        read_all(&mut stream).await;
        let given = stream.checkpoint();
        producer.roll_back(VB, Seqno(5)).unwrap();
        write(&producer, 20..20 + written);
        producer.persist();

        let options = with(options, |o| o.start = StreamStart::Checkpoint(given.clone()));
        let mut stream = client.stream(options, Rows::default).await.unwrap();
        let wanted: Vec<String> = read_all(&mut stream).await.iter().map(described).collect();
        assert_eq!(wanted.first().map(String::as_str), Some("rollback to 5 in 1"));
        for limits in [last(), followed()] {
            let mut planner = planner(&producer).await;
            let start = planner.start_at(given.clone());
            let (items, end) = batch(&producer, &mut planner, &start, &limits).await.unwrap();
            assert_eq!(items, wanted, "{written} {limits:?}");
            assert_eq!((end.get(VB).seqno.0, end.get(VB).epoch), (5 + u64::from(written), 1));
            let (more, _) = batch(&producer, &mut planner, &end.into(), &limits).await.unwrap();
            assert!(more.is_empty(), "{more:?}");
        }
        let mut planner = planner(&producer).await;
        let fail = with(last(), |o| o.on_rollback = OnRollback::Fail);
        let error = planner.end(&planner.start_at(given), &fail).await.unwrap_err();
        assert!(matches!(error, PlannerError::Plan(PlanError::RolledBack { .. })), "{error}");
    }
}

#[tokio::test]
async fn checkpoint_inside_a_snapshot_with_a_purge_seqno_is_resumed() {
    let producer = producer(1, 4).await;
    write(&producer, 0..10);
    for key in own_keys(8..10) {
        producer.remove(key.as_bytes(), WriteOptions::default()).unwrap();
    }
    write(&producer, 10..15);
    producer.persist();
    producer.purge(VB, Seqno(12)).unwrap();
    let client = connect(&producer).await;
    let options = with(options(StreamStart::Earliest, End::Now), |o| o.batch.max_rows = 3);
    let mut stream = client.stream(options.clone(), Rows::default).await.unwrap();
    let given = stream.next().await.unwrap().unwrap().checkpoint;
    let position = given.position(VB).unwrap();
    assert_eq!((position.seqno, position.purge_seqno), (Seqno(3), Seqno(12)));
    drop(stream);
    // The server resumes below its purge seqno: nothing was purged since.
    let options = with(options, |o| o.start = StreamStart::Checkpoint(given.clone()));
    let mut stream = client.stream(options, Rows::default).await.unwrap();
    let wanted: Vec<String> = read_all(&mut stream).await.iter().map(described).collect();
    assert_eq!(wanted.first().map(String::as_str), Some("4"));
    for limits in [last(), followed()] {
        let mut planner = planner(&producer).await;
        let start = planner.start_at(given.clone());
        let (items, _) = batch(&producer, &mut planner, &start, &limits).await.unwrap();
        assert_eq!(items, wanted, "{limits:?}");
    }
}

#[tokio::test]
async fn planned_rollbacks_come_first_in_each_stream_of_the_plan() {
    let producer = producer(1, 4).await;
    (0..4).for_each(|vbid| write_to(&producer, Vbid(vbid), 0..4));
    producer.persist();
    let mut planner = planner(&producer).await;
    let limits = followed();
    let end = planner.end(&planner.earliest().into(), &limits).await.unwrap();
    // Nothing is left to read of any but the first.
    (0..3).for_each(|vbid| producer.roll_back(Vbid(vbid), Seqno(2)).unwrap());
    write(&producer, 100..103);
    producer.persist();
    let start = Start::from(end);
    let end = planner.end(&start, &limits).await.unwrap();
    let [plan] = &planner.partitions(&start, &end, None, &limits).await.unwrap()[..] else {
        panic!("there is one node")
    };
    let client = connect(&producer).await;
    for max_rows in [2, 100, 1] {
        let delivery = with(StreamOptions::default(), |o| o.batch.max_rows = max_rows);
        let mut stream = client.run(plan, &delivery, Rows::default).await.unwrap();
        let (mut items, mut largest) = (Vec::new(), 0);
        while let Some(delivered) = stream.next().await {
            let delivered = delivered.unwrap();
            assert_eq!(delivered.rows, delivered.batch.len());
            largest = largest.max(delivered.rows);
            items.extend(delivered.batch.iter().map(described));
        }
        let rollbacks = ["rollback to 2 in 1"; 3];
        assert_eq!((&items[..3], items.len()), (&rollbacks.map(str::to_owned)[..], 6));
        assert!(largest <= max_rows);
        let events = stream.take_events();
        let told = events.iter().filter(|event| matches!(event, StreamEvent::RolledBack(_)));
        assert_eq!(told.count(), 3);
        let at = stream.checkpoint();
        assert!((0..3).all(|vbid| at.position(Vbid(vbid)).unwrap().epoch == 1));
    }
}

#[tokio::test]
async fn checkpoint_of_another_bucket_is_refused() {
    let (one, other) = (producer(1, 4).await, producer(1, 4).await);
    write(&one, 0..3);
    let mut planner = planner(&other).await;
    let start = planner.start_at(checkpoint(&one).await);
    let error = planner.end(&start, &last()).await.unwrap_err();
    assert!(matches!(error, PlannerError::Checkpoint(_)), "{error}");
}

/// Nobody is told statistics, as with the role *Data DCP Reader*.
fn keep_statistics(producer: &Producer) {
    let condition = Condition::opcode(Opcode::STAT);
    let rule = Rule::new(condition, Reaction::Answer(Status::EACCESS));
    producer.set_faults(vec![rule]).unwrap();
}

#[tokio::test]
async fn purge_is_noticed_without_statistics() {
    for told in [true, false] {
        let producer = producer(1, 4).await;
        write(&producer, 0..5);
        producer.persist();
        if !told {
            keep_statistics(&producer);
        }
        let mut planner = planner(&producer).await;
        let begin = planner.earliest().into();
        let (_, read) = batch(&producer, &mut planner, &begin, &followed()).await.unwrap();
        write(&producer, 5..7);
        producer.persist();
        let read: Start = read.into();
        let noted = planner.end(&read, &followed()).await.unwrap();
        for key in own_keys(0..2) {
            producer.remove(key.as_bytes(), WriteOptions::default()).unwrap();
        }
        write(&producer, 7..8);
        producer.persist();
        producer.purge(VB, Seqno(9)).unwrap();

        for _ in 0..2 {
            let error = batch(&producer, &mut planner, &read, &followed()).await.unwrap_err();
            let is_purge = matches!(error, PlannerError::Plan(PlanError::Purged { vbid: VB, .. }));
            assert!(is_purge, "{error}");
            let allowed = with(followed(), |o| o.on_purge = OnPurge::Resync);
            let (items, end) = batch(&producer, &mut planner, &read, &allowed).await.unwrap();
            assert_eq!(items[0], "rollback to 0 in 1");
            assert_eq!((items.len(), end.get(VB).epoch), (1 + 6, 1), "{items:?}");
        }
        // The end of a batch was written to a log, and its driver has died.
        let mut planner = self::planner(&producer).await;
        let error = planner.partitions(&read, &noted, None, &followed()).await.unwrap_err();
        assert!(matches!(error, PlannerError::Plan(PlanError::Purged { .. })), "{error}");
        let allowed = with(followed(), |o| o.on_purge = OnPurge::Resync);
        let again = planner.partitions(&read, &noted, None, &allowed).await.unwrap();
        let items = self::read(&producer, &again[0]).await.unwrap();
        assert_eq!(again[0].ranges().map(|range| range.epoch()).max(), Some(0));
        assert_eq!(items.len(), 2, "what is left of the range, and nothing twice: {items:?}");
    }
}

#[tokio::test]
async fn batch_is_read_as_planned_after_its_filter_was_narrowed() {
    for is_dropped in [false, true] {
        let producer = producer(1, 4).await;
        let orders = producer.create_collection("_default", "orders", None).unwrap();
        let carts = producer.create_collection("_default", "carts", None).unwrap();
        for (id, keys) in [(orders, 0..2), (carts, 2..5)] {
            for key in own_keys(keys) {
                let mut options = WriteOptions::default();
                options.collection_id = id;
                producer.upsert(key.as_bytes(), Bytes::from("{}"), options).unwrap();
            }
        }
        producer.persist();
        let client = connect(&producer).await;
        let planner = async |names: &[&str]| {
            let names = names.iter().map(ToString::to_string).collect();
            let filter = Filter::Collections(names);
            Planner::new(&client, with(StreamOptions::default(), |o| o.filter = filter)).await
        };
        let mut both = planner(&["_default.orders", "_default.carts"]).await.unwrap();
        let begin = both.earliest();
        let end = both.end(&begin.clone().into(), &followed()).await.unwrap();

        // The batch was written down and not read; the job comes back for a part of it.
        if is_dropped {
            producer.drop_collection("_default", "carts").unwrap();
            producer.persist();
        }
        let mut one = planner(&["_default.orders"]).await.unwrap();
        let mut rows = 0;
        let start = Start::from(begin);
        for partition in one.partitions(&start, &end, None, &followed()).await.unwrap() {
            rows += read(&producer, &partition).await.unwrap().len();
        }
        // Or what a job with both is given next would lack what was skipped here.
        assert_eq!(rows, if is_dropped { 2 } else { 5 });
        let next = one.end(&end.into(), &followed()).await.unwrap();
        assert_eq!(next.filter(), one.earliest().filter(), "narrow from the next batch on");
    }
}

#[tokio::test]
async fn cluster_that_was_planned_for_may_be_away() {
    let producer = producer(1, 4).await;
    write(&producer, 0..5);
    // The node is killed: what is in memory only is gone.
    producer.persist();
    let options = connect(&producer).await.connect_options().clone();
    let client =
        Client::connect(options.with_connect_timeout(Duration::from_millis(300))).await.unwrap();
    let short = with(StreamOptions::default(), |o| o.retry_timeout = Duration::from_millis(500));
    let mut hasty = Planner::new(&client, short).await.unwrap();
    let mut patient = Planner::new(&client, StreamOptions::default()).await.unwrap();
    let begin: Start = patient.earliest().into();
    for planner in [&mut hasty, &mut patient] {
        planner.end(&begin, &last()).await.unwrap();
    }
    producer.kill(0).unwrap();
    hasty.end(&begin, &last()).await.unwrap_err();
    let since = Instant::now();
    let planned = tokio::spawn(async move {
        let end = patient.end(&begin, &last()).await.unwrap();
        (patient.partitions(&begin, &end, None, &last()).await.unwrap(), end)
    });
    sleep(Duration::from_secs(2)).await;
    producer.restart(0, true).await.unwrap();
    let (partitions, _) = planned.await.unwrap();
    assert!(since.elapsed() >= Duration::from_secs(2));

    // And so for the task.
    producer.kill(0).unwrap();
    let partition = partitions[0].clone();
    let opening = tokio::spawn(async move {
        let base = StreamOptions::default();
        let opened = open(client.connect_options(), None, &partition, &base, |_| Rows::default);
        let (_client, mut stream) = opened.await.unwrap();
        read_all(&mut stream).await.len()
    });
    sleep(Duration::from_secs(2)).await;
    producer.restart(0, true).await.unwrap();
    assert_eq!(opening.await.unwrap(), 5);
}

#[tokio::test]
async fn retry_timeout_of_zero_still_plans_a_resumed_read() {
    let producer = producer(1, 4).await;
    write(&producer, 0..5);
    let client = connect(&producer).await;
    let impatient = with(StreamOptions::default(), |o| o.retry_timeout = Duration::ZERO);
    let mut planner = Planner::new(&client, impatient).await.unwrap();
    let begin: Start = planner.earliest().into();
    let end = planner.end(&begin, &last()).await.unwrap();
    write(&producer, 5..9);
    planner.observe(false).await.unwrap();
    // Whether the server still has the history up to here is a question.
    let resumed: Start = end.into();
    let end = planner.end(&resumed, &last()).await.unwrap();
    assert!(!planner.partitions(&resumed, &end, None, &last()).await.unwrap().is_empty());
}

#[tokio::test]
async fn planner_fails_at_once_for_scopes_and_collections_that_never_existed() {
    let producer = producer(1, 4).await;
    let client = connect(&producer).await;
    let since = Instant::now();
    let missing = |filter| with(StreamOptions::default(), |o| o.filter = filter);
    for filter in [Filter::Scope("nope".into()), Filter::Collections(vec!["_default.no".into()])] {
        let error = Planner::new(&client, missing(filter)).await.unwrap_err();
        let PlannerError::Cluster(error) = error else { panic!("{error}") };
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
    let vbuckets = Some(vec![Vbid(4)]);
    let beyond = with(StreamOptions::default(), |o| o.vbuckets = vbuckets);
    assert!(Planner::new(&client, beyond).await.is_err());
    // The nodes have never answered this user's questions.
    let condition = Condition::opcode(Opcode::DCP_OPEN);
    let rule = Rule::new(condition, Reaction::Answer(Status::EACCESS));
    producer.set_faults(vec![rule]).unwrap();
    let mut planner = planner(&producer).await;
    let begin = planner.earliest().into();
    planner.end(&begin, &last()).await.unwrap_err();
    assert!(since.elapsed() < ANSWER_TIMEOUT / 2);
}

#[tokio::test]
async fn vbucket_without_a_node_is_waited_for() {
    let mut options = cluster_options();
    (options.nodes, options.vbuckets) = (2, 4);
    let producer = Producer::start(options).await.unwrap();
    write(&producer, 0..5);
    let node = producer.copies_of(VB).unwrap()[0];
    let connect = ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(reader())
        .with_connect_timeout(Duration::from_millis(500));
    let client = Client::connect(connect).await.unwrap();
    let short = with(StreamOptions::default(), |o| o.retry_timeout = Duration::from_secs(1));
    let mut planner = Planner::new(&client, short).await.unwrap();
    let begin: Start = planner.earliest().into();
    let end = planner.end(&begin, &last()).await.unwrap();
    // There is no replica: the map has no node for its vBuckets from now on.
    producer.failover_unsafely(&[node]).unwrap();
    // The client learns of it between the two questions.
    let unanswered = client.high_seqnos().await.unwrap_err();
    assert!(unanswered.is_retryable(), "{unanswered}");
    let error = planner.partitions(&begin, &end, None, &last()).await.unwrap_err();
    assert!(error.to_string().contains("vb:"), "{error}");
    planner.end(&begin, &last()).await.unwrap_err();
}

#[tokio::test]
async fn head_seqno_is_that_of_the_collections_that_are_read() {
    let producer = producer(2, 4).await;
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    let put = |id: CollectionId, count: u32| {
        let mut options = WriteOptions::default();
        options.collection_id = id;
        for n in 0..count {
            producer.upsert(format!("k{n}").as_bytes(), Bytes::from("{}"), options).unwrap();
        }
    };
    put(carts, 40);
    put(CollectionId::DEFAULT, 100);
    producer.persist();
    let client = connect(&producer).await;
    let lag = |head: &Offsets, end: &Offsets| -> u64 {
        let left = |(vbid, offset): (Vbid, _)| {
            let end: dcp_proto::plan::Offset = end.get(vbid);
            let offset: dcp_proto::plan::Offset = offset;
            offset.seqno.0.saturating_sub(end.seqno.0)
        };
        head.iter().map(left).sum()
    };
    for (filter, at_most) in [
        (Filter::All, u64::MAX),
        (Filter::Scope("_default".into()), u64::MAX),
        (Filter::Collections(vec!["_default.carts".into()]), 40 + 4),
    ] {
        let options = with(StreamOptions::default(), |o| o.filter = filter.clone());
        let mut planner = Planner::new(&client, options).await.unwrap();
        assert_eq!(planner.head(), None);
        let begin: Start = planner.earliest().into();
        let few = with(followed(), |o| o.max_seqnos = Some(8));
        let end = planner.end(&begin, &few).await.unwrap();
        let left = lag(&planner.head().unwrap(), &end);
        assert!(left > 0 && left <= at_most, "{left} {filter:?}");
        let end = planner.end(&begin, &followed()).await.unwrap();
        assert_eq!(lag(&planner.head().unwrap(), &end), 0, "{filter:?}");
    }
}
