//! JSON of servers whose members are as many and as small as they can be.

use std::time::{Duration, Instant};

use dcp_meter::{Meter, alone};
use dcp_proto::topology::{BucketConfig, GlobalConfig, MAX_CONFIG_LEN, Manifest};

/// What may be held beyond four times the document: members of few bytes, of which there are only
/// so many.
const BEYOND: usize = 16 << 20;

/// How long reading a document of 10 MiB may take, in a debug build beside other tests.
const SOON: Duration = Duration::from_secs(10);

/// `head`, `member` as often as there is room, and `tail`.
fn filled(head: &str, member: &str, tail: &str) -> Vec<u8> {
    let room = MAX_CONFIG_LEN - head.len() - tail.len();
    let members = vec![member; (room + 1) / (member.len() + 1)].join(",");
    format!("{head}{members}{tail}").into_bytes()
}

#[test]
fn a_document_of_many_small_members_takes_little_more_memory_than_it_is_long() {
    const HEAD: &str = r#"{"rev":1,"name":"a","uuid":"b","#;
    let _alone = alone();
    let map = |servers: &str| {
        format!(r#"],"vBucketServerMap":{{"serverList":[{servers}],"vBucketMap":[[0]]}}}}"#)
    };
    let name = "n".repeat(MAX_CONFIG_LEN - 100_000);
    let named = format!(
        r#"{HEAD}"nodesExt":[{{"services":{{"kv":1}},"alternateAddresses":{{"external":{{"hostname":"{name}"}}}}}}{}"#,
        map(&vec![r#""$HOST:1""#; 1000].join(","))
    );
    let collections: Vec<_> =
        (0..400_000).map(|id| format!(r#"{{"name":"","uid":"{id:x}"}}"#)).collect();
    let collections = format!(
        r#"{{"uid":"1","scopes":[{{"name":"","uid":"0","collections":[{}]}}]}}"#,
        collections.join(",")
    );
    let documents = [
        ("nodes", filled(&format!(r#"{HEAD}"nodesExt":["#), "{}", &map(""))),
        ("nodes to look for", {
            let servers = vec![r#""h:1""#; 500_000].join(",");
            let head = format!(r#"{HEAD}"nodesExt":["#);
            let tail = map(&servers);
            let nodes = vec!["{}"; (MAX_CONFIG_LEN - head.len() - tail.len()) / 3].join(",");
            format!("{head}{nodes}{tail}").into_bytes()
        }),
        (
            "servers",
            filled(&format!(r#"{HEAD}"vBucketServerMap":{{"serverList":["#), r#""h:1""#, "]}}"),
        ),
        ("vBuckets", filled(&format!(r#"{HEAD}"vBucketServerMap":{{"vBucketMap":["#), "[]", "]}}")),
        ("copies", filled(&format!(r#"{HEAD}"vBucketServerMap":{{"vBucketMap":[["#), "0", "]]}}")),
        ("capabilities", filled(&format!(r#"{HEAD}"bucketCapabilities":["#), r#""""#, "]}")),
        ("a long name", named.into_bytes()),
        ("scopes", filled(r#"{"uid":"1","scopes":["#, r#"{"name":"","uid":"0"}"#, "]}")),
        ("collections", collections.into_bytes()),
    ];
    let mut beyond = Vec::new();
    for (what, document) in documents {
        assert!(document.len() <= MAX_CONFIG_LEN, "{what}: {} bytes", document.len());
        let (meter, began) = (Meter::start(), Instant::now());
        let read = [
            BucketConfig::parse(&document, "127.0.0.1").is_ok(),
            GlobalConfig::parse(&document, "127.0.0.1").is_ok(),
            Manifest::parse(&document).is_ok(),
        ];
        let (most, took) = (meter.most(), began.elapsed());
        let figures = format!("{what}: {} KiB held, {took:?}, read {read:?}", most >> 10);
        eprintln!("{figures}");
        if most > 4 * document.len() + BEYOND || took > SOON || most > 30 << 20 {
            beyond.push(figures);
        }
    }
    assert!(beyond.is_empty(), "more than is allowed: {beyond:#?}");
}
