use dcp_wire::{CollectionId, ManifestUid, ScopeId};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// Two nodes, four vBuckets, one of them nowhere.
fn config() -> Value {
    json!({
        "rev": 7, "revEpoch": 2, "name": "travel", "uuid": "8fa2", "nodeLocator": "vbucket",
        "bucketType": "membase", "bucketCapabilities": ["dcp", "collections"],
        "collectionsManifestUid": "1f",
        "nodesExt": [
            {"services": {"kv": 11210, "kvSSL": 11207, "mgmt": 8091}, "hostname": "n0"},
            {"services": {"kv": 11210, "mgmt": 8091}, "hostname": "n1"},
            {"services": {"mgmt": 8091}, "hostname": "n2"}
        ],
        "vBucketServerMap": {
            "hashAlgorithm": "CRC", "numReplicas": 1,
            "serverList": ["n0:11210", "n1:11210"],
            "vBucketMap": [[0, 1], [1, 0], [0, -1], [-1, -1]]
        }
    })
}

fn parse(json: &Value) -> Result<BucketConfig, InvalidConfig> {
    BucketConfig::parse(json.to_string().as_bytes(), "seed")
}

fn with(change: impl FnOnce(&mut Value)) -> Value {
    let mut json = config();
    change(&mut json);
    json
}

/// The configurations recorded from real servers.
fn recorded_configs() -> Vec<Vec<u8>> {
    let traces = [
        include_str!("../../../../tests/traces/8.0.2-sdk-python-scram.jsonl"),
        include_str!("../../../../tests/traces/8.0.2-sdk-python-plain.jsonl"),
        include_str!("../../../../tests/traces/8.0.2-cluster-failover.jsonl"),
    ];
    let is_it = |frame: &dcp_wire::Frame<'_>| {
        frame.header.magic.is_response()
            && frame.header.opcode == dcp_wire::Opcode::GET_CLUSTER_CONFIG
    };
    traces.iter().flat_map(|trace| bodies(trace, &is_it)).collect()
}

/// The values of the recorded packets that are wanted.
fn bodies(trace: &str, wanted: &dyn Fn(&dcp_wire::Frame<'_>) -> bool) -> Vec<Vec<u8>> {
    let packets = trace.lines().filter_map(|line| {
        let line: Value = serde_json::from_str(line).unwrap();
        let hex = line["hex"].as_str()?;
        let digits = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16));
        Some(digits.collect::<Result<Vec<_>, _>>().unwrap())
    });
    packets
        .filter_map(|packet| {
            let (frame, _) = dcp_wire::Frame::parse(&packet, MAX_CONFIG_LEN).ok()??;
            wanted(&frame).then(|| frame.value.to_vec())
        })
        .collect()
}

#[test]
fn configurations_of_real_servers_are_read() {
    let (mut buckets, mut globals) = (Vec::new(), Vec::new());
    for json in recorded_configs() {
        match BucketConfig::parse(&json, "127.0.0.1") {
            Ok(config) => buckets.push(config),
            Err(error) => {
                assert_eq!(error, InvalidConfig::Missing("vBucketServerMap"));
                globals.push(GlobalConfig::parse(&json, "127.0.0.1").unwrap());
            }
        }
    }
    let seen: Vec<_> = buckets
        .iter()
        .map(|c| (c.name(), c.num_vbuckets(), c.nodes().len(), c.revision().rev))
        .collect();
    let sdk = ("default", 64, 1, 1);
    assert_eq!(seen, [sdk, sdk, ("default", 8, 2, 1), ("default", 8, 1, 2)]);
    let global = |config: &GlobalConfig| (config.nodes().len(), config.revision().rev > 0);
    assert_eq!(globals.iter().map(global).collect::<Vec<_>>(), [(1, true); 2]);
    let port = |config: &BucketConfig, node: usize| {
        config.nodes()[node].data_address(Network::Default, false).unwrap().port
    };
    let (before, after) = (&buckets[2], &buckets[3]);
    assert_eq!(port(before, before.active(Vbid(0)).unwrap()), 12910);
    assert_eq!(port(after, after.active(Vbid(0)).unwrap()), 12911, "failed over");
    assert!(after.is_newer_than(before) && !before.is_newer_than(after));
    assert!(!after.is_newer_than(after), "the same revision brings nothing new");
    assert!(after.has_capability("collections") && !after.has_capability("collection"));
}

#[test]
fn configuration_in_a_not_my_vbucket_answer_is_read() {
    let traces = [
        include_str!("../../../../tests/traces/6.0.5-meta-commands.jsonl"),
        include_str!("../../../../tests/traces/8.0.2-meta-commands.jsonl"),
    ];
    let revisions: Vec<_> = traces
        .iter()
        .map(|trace| {
            let is_it = |frame: &dcp_wire::Frame<'_>| {
                frame.header.magic.is_response()
                    && frame.header.status() == dcp_wire::Status::NOT_MY_VBUCKET
                    && !frame.value.is_empty()
            };
            let bodies = bodies(trace, &is_it);
            BucketConfig::parse(bodies.first().unwrap(), "127.0.0.1").unwrap().revision()
        })
        .collect();
    assert_eq!(revisions, [Revision { epoch: 0, rev: 5 }, Revision { epoch: 1, rev: 5 }]);
}

#[test]
fn vbuckets_are_on_the_nodes_the_map_says() {
    let config = parse(&config()).unwrap();
    assert_eq!(config.num_vbuckets(), 4);
    assert_eq!((config.active(Vbid(0)), config.active(Vbid(1))), (Some(0), Some(1)));
    assert_eq!((config.active(Vbid(3)), config.active(Vbid(4))), (None, None));
    assert_eq!(config.replicas(Vbid(0)).collect::<Vec<_>>(), [Some(1)]);
    assert_eq!(config.replicas(Vbid(2)).collect::<Vec<_>>(), [None]);
    assert_eq!(config.replicas(Vbid(9)).count(), 0);
    assert_eq!(config.active_on(0).collect::<Vec<_>>(), [Vbid(0), Vbid(2)]);
    assert_eq!(config.nodes().len(), 2, "the third node has no data");
    assert_eq!((config.uuid(), config.manifest_uid()), ("8fa2", Some(ManifestUid(0x1f))));
}

#[test]
fn map_revision_of_a_newer_epoch_is_newer() {
    let at = |epoch: i64, rev: i64| {
        parse(&with(|json| {
            json["revEpoch"] = epoch.into();
            json["rev"] = rev.into();
        }))
        .unwrap()
    };
    assert!(at(3, 1).is_newer_than(&at(2, 900)));
    assert!(!at(2, 900).is_newer_than(&at(3, 1)));
    let old = parse(&with(|json| {
        json.as_object_mut().unwrap().remove("revEpoch");
    }));
    assert_eq!(old.unwrap().revision(), Revision { epoch: 0, rev: 7 });
}

#[test]
fn ephemeral_bucket_is_recognised() {
    assert!(!parse(&config()).unwrap().is_ephemeral());
    let ephemeral = parse(&with(|json| json["bucketType"] = "ephemeral".into())).unwrap();
    assert!(ephemeral.is_ephemeral());
    for (capabilities, is_ephemeral) in
        [(vec!["dcp", "couchapi"], false), (vec!["dcp"], true), (vec![], false)]
    {
        let unnamed = parse(&with(|json| {
            json.as_object_mut().unwrap().remove("bucketType");
            json["bucketCapabilities"] = capabilities.clone().into();
        }));
        assert_eq!(unnamed.unwrap().is_ephemeral(), is_ephemeral, "{capabilities:?}");
    }
}

#[test]
fn ephemeral_bucket_is_not_guessed_where_type_or_storage_is_named() {
    for (bucket_type, storage, is_ephemeral) in [
        (Some("membase"), Some("magma"), false),
        (Some("membase"), None, false),
        (Some("ephemeral"), Some("undefined"), true),
        (None, Some("magma"), false),
        (None, Some("couchstore"), false),
        (None, Some("undefined"), true),
    ] {
        let config = parse(&with(|json| {
            json["bucketCapabilities"] = vec!["dcp", "collections"].into();
            json.as_object_mut().unwrap().remove("bucketType");
            for (name, value) in [("bucketType", bucket_type), ("storageBackend", storage)] {
                if let Some(value) = value {
                    json[name] = value.into();
                }
            }
        }));
        let found = config.unwrap().is_ephemeral();
        assert_eq!(found, is_ephemeral, "{bucket_type:?} on {storage:?}");
    }
}

#[test]
fn server_that_can_resume_below_its_purge_seqno_says_so() {
    for (capability, can) in [("dcp.IgnorePurgedTombstones", true), ("dcp", false)] {
        let config = parse(&with(|json| json["bucketCapabilities"] = json!([capability])));
        assert_eq!(config.unwrap().ignores_purges(), can);
    }
}

#[test]
fn map_indexes_that_name_no_node_are_refused() {
    for (index, vbid) in [(2, 1), (-2, 1), (65_536, 1), (i64::MAX, 1), (i64::MIN, 1)] {
        let json = with(|json| json["vBucketServerMap"]["vBucketMap"][1][1] = index.into());
        assert_eq!(
            parse(&json).unwrap_err(),
            InvalidConfig::NodeIndex { vbid: Vbid(vbid), index, nodes: 2 }
        );
    }
}

#[test]
fn configuration_error_names_what_is_missing() {
    for member in ["rev", "name", "uuid", "vBucketServerMap"] {
        let json = with(|json| {
            json.as_object_mut().unwrap().remove(member);
        });
        assert_eq!(parse(&json).unwrap_err(), InvalidConfig::Missing(member));
    }
    let negative = with(|json| json["rev"] = (-1).into());
    assert_eq!(parse(&negative).unwrap_err(), InvalidConfig::Impossible("rev"));
    let first = with(|json| json["rev"] = 0.into());
    assert_eq!(parse(&first).unwrap().revision().rev, 0);
    let manifest = with(|json| json["collectionsManifestUid"] = "no hex".into());
    let expected = InvalidConfig::Impossible("collectionsManifestUid");
    assert_eq!(parse(&manifest).unwrap_err(), expected);
    let server = with(|json| json["vBucketServerMap"]["serverList"][0] = "n0".into());
    assert_eq!(parse(&server).unwrap_err(), InvalidConfig::Impossible("server list entry"));
}

#[test]
fn buckets_without_vbuckets_say_so() {
    let memcached = with(|json| json["nodeLocator"] = "ketama".into());
    assert_eq!(parse(&memcached).unwrap_err(), InvalidConfig::NoVbuckets);
    let empty = with(|json| json["vBucketServerMap"]["vBucketMap"] = json!([]));
    assert_eq!(parse(&empty).unwrap_err(), InvalidConfig::NoVbuckets);
}

#[test]
fn configuration_of_impossible_sizes_is_refused() {
    let map = |rows: usize| {
        with(|json| json["vBucketServerMap"]["vBucketMap"] = vec![json!([0]); rows].into())
    };
    let nodes = |count: usize| with(|json| json["nodesExt"] = vec![json!({}); count].into());
    let copies = |count: usize| {
        with(|json| json["vBucketServerMap"]["vBucketMap"][0] = vec![0; count].into())
    };
    let named = |len: usize| with(|json| json["nodesExt"][0]["hostname"] = "n".repeat(len).into());
    for (good, bad) in [
        (map(MAX_VBUCKETS), map(MAX_VBUCKETS + 1)),
        (nodes(1024), nodes(1025)),
        (copies(4), copies(5)),
        (named(255), named(256)),
    ] {
        assert!(parse(&good).is_ok());
        let error = parse(&bad).unwrap_err();
        assert!(
            matches!(error, InvalidConfig::Json { .. } | InvalidConfig::Impossible("host name")),
            "{error}"
        );
    }
}

#[test]
fn configuration_beyond_the_limit_is_not_parsed() {
    let len = MAX_CONFIG_LEN + 1;
    let error = BucketConfig::parse(&vec![b' '; len], "seed").unwrap_err();
    assert_eq!(error, InvalidConfig::TooLarge { len });
}

#[test]
fn host_placeholders_are_filled_with_the_host_connected_to() {
    let mut json = with(|json| json["nodesExt"][0]["hostname"] = "$HOST".into());
    json["vBucketServerMap"]["serverList"][0] = "$HOST:11210".into();
    json["nodesExt"][1].as_object_mut().unwrap().remove("hostname");
    json["nodesExt"][1]["thisNode"] = true.into();
    json["vBucketServerMap"]["serverList"][1] = "seed:11210".into();
    let config = parse(&json).unwrap();
    assert_eq!(config.nodes()[0].hostname(), "seed");
    assert_eq!(config.nodes()[1].hostname(), "seed");
    assert!(config.nodes()[0].data_address(Network::Default, true).is_some());
}

#[test]
fn ipv6_addresses_have_brackets_on_the_outside_only() {
    let mut json = with(|json| json["nodesExt"][0]["hostname"] = "fd00::1".into());
    json["vBucketServerMap"]["serverList"][0] = "[fd00::1]:11210".into();
    json["vBucketServerMap"]["serverList"][1] = "[fd00::2]:11210".into();
    json["nodesExt"].as_array_mut().unwrap().truncate(1);
    let config = parse(&json).unwrap();
    let address = |node: usize| config.nodes()[node].data_address(Network::Default, false).unwrap();
    assert_eq!(address(0), Address { host: "fd00::1".to_owned(), port: 11210 });
    assert_eq!(address(0).to_string(), "[fd00::1]:11210");
    assert_eq!(address(1).to_string(), "[fd00::2]:11210", "from the server list alone");
}

#[test]
fn nodes_in_another_order_are_found_by_their_address() {
    let json = with(|json| {
        let nodes = json["nodesExt"].as_array_mut().unwrap();
        nodes.rotate_right(1);
    });
    let config = parse(&json).unwrap();
    let names: Vec<_> = config.nodes().iter().map(Node::hostname).collect();
    assert_eq!(names, ["n0", "n1"]);
}

#[test]
fn port_0_is_no_address() {
    let listed = with(|json| {
        json["nodesExt"] = json!([]);
        json["vBucketServerMap"]["serverList"] = json!(["n0:0", "n1:11210"]);
    });
    let config = parse(&listed).unwrap();
    assert_eq!(config.nodes()[0].data_address(Network::Default, false), None);
    let second = Address::new("n1", 11210);
    assert_eq!(config.nodes()[1].data_address(Network::Default, false), Some(second));
    let extended = with(|json| json["nodesExt"][0]["services"] = json!({"kv": 0, "mgmt": 8091}));
    // The entry is not the one the server list names, which has a port.
    let first = Address::new("n0", 11210);
    let config = parse(&extended).unwrap();
    assert_eq!(config.nodes()[0].data_address(Network::Default, false), Some(first));
}

fn with_alternates() -> BucketConfig {
    parse(&with(|json| {
        for (node, name) in ["lb0", "lb1"].into_iter().enumerate() {
            let ports = json!({"kv": 32000 + node, "kvSSL": 33000 + node});
            json["nodesExt"][node]["alternateAddresses"] =
                json!({"external": {"hostname": name, "ports": ports}});
        }
    }))
    .unwrap()
}

#[test]
fn network_is_the_one_that_names_the_first_connection() {
    let config = with_alternates();
    let network = |host: &str, port| {
        NetworkSelection::Auto.network(config.nodes(), &Address::new(host, port))
    };
    assert_eq!(network("n0", 11210), Network::Default);
    assert_eq!(network("N0", 11207), Network::Default, "TLS port, other case");
    assert_eq!(network("lb1", 32001), Network::External);
    assert_eq!(network("lb1", 33001), Network::External);
    assert_eq!(network("balancer", 1), Network::External, "unknown name: meant for outsiders");
    assert_eq!(network("balancer", 11210), Network::External, "the usual port of an unknown name");
    assert_eq!(network("n0", 32000), Network::External, "a forwarded port");
    let fixed = NetworkSelection::Fixed(Network::Default);
    assert_eq!(fixed.network(config.nodes(), &Address::new("lb1", 32001)), Network::Default);
    let plain = parse(&self::config()).unwrap();
    let by_alias = NetworkSelection::Auto.network(plain.nodes(), &Address::new("alias", 11210));
    assert_eq!(by_alias, Network::Default, "no alternate addresses at all");
}

#[test]
fn node_is_itself_by_its_full_name() {
    let named = |name: &str, external: &str| {
        parse(&with(|json| {
            json["nodesExt"][0]["hostname"] = json!(name);
            json["vBucketServerMap"]["serverList"][0] = json!(format!("{name}:11210"));
            json["nodesExt"][0]["alternateAddresses"] = json!({"external": {"hostname": external}});
        }))
        .unwrap()
    };
    let network = |config: &BucketConfig, host: &str| {
        NetworkSelection::Auto.network(config.nodes(), &Address::new(host, 11210))
    };
    let pod = named("cb-0.cb.default.svc", "cb-0.example.com");
    assert_eq!(network(&pod, "cb-0.cb.default.svc.cluster.local"), Network::Default);
    assert_eq!(network(&pod, "CB-0.cb.Default.svc.cluster.local"), Network::Default);
    assert_eq!(network(&pod, "cb-0.cb.default.svcs"), Network::External, "another name");
    assert_eq!(network(&pod, "cb-0.example.com"), Network::External);
    let alike = named("cb-0.cb", "cb-0.cb.example.com");
    assert_eq!(network(&alike, "cb-0.cb.example.com"), Network::External, "named as such");
    assert_eq!(network(&named("n0", "lb0"), "n0.example.com"), Network::External, "one label");
    let ip = named("10.0.0.1", "lb0");
    assert_eq!(network(&ip, "10.0.0.1.example.com"), Network::External, "no name");
}

#[test]
fn alternate_addresses_have_their_own_ports_or_the_usual_ones() {
    let config = with_alternates();
    let node = &config.nodes()[1];
    let external = |tls| node.data_address(Network::External, tls).map(|a| a.to_string());
    assert_eq!(external(false).as_deref(), Some("lb1:32001"));
    assert_eq!(external(true).as_deref(), Some("lb1:33001"));

    let same = parse(&with(|json| {
        json["nodesExt"][0]["alternateAddresses"] = json!({"external": {"hostname": "lb"}});
    }))
    .unwrap();
    let address = same.nodes()[0].data_address(Network::External, false).unwrap();
    assert_eq!(address.to_string(), "lb:11210");
    assert_eq!(same.nodes()[1].data_address(Network::External, false), None);
}

#[test]
fn manifest_maps_ids_and_names() {
    let json = json!({"uid": "a2", "scopes": [
        {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]},
        {"name": "inventory", "uid": "8", "collections": [
            {"name": "airline", "uid": "8", "maxTTL": 60, "history": false},
            {"name": "hotel", "uid": "cafe"}
        ]}
    ]});
    let manifest = Manifest::parse(json.to_string().as_bytes()).unwrap();
    assert_eq!(manifest.uid(), ManifestUid(0xa2));
    assert_eq!(manifest.names(CollectionId(0xcafe)), Some(("inventory", "hotel")));
    assert_eq!(manifest.names(CollectionId(0)), Some(("_default", "_default")));
    assert_eq!(manifest.names(CollectionId(9)), None);
    let airline = manifest.collection_named("inventory", "airline").unwrap();
    assert_eq!((airline.id, airline.max_ttl), (CollectionId(8), Some(60)));
    assert_eq!(manifest.scope_named("inventory").unwrap().id, ScopeId(8));
    assert!(manifest.collection_named("_default", "airline").is_none());
    assert_eq!((manifest.scopes().count(), manifest.collections().count()), (2, 3));
}

#[test]
fn manifest_with_impossible_ids_is_refused() {
    let manifest = |scope: &str, first: &str, second: &str| {
        let collection = |uid: &str| json!({"name": "c", "uid": uid});
        let collections = [collection(first), collection(second)];
        let scope = json!({"name": "s", "uid": scope, "collections": collections});
        Manifest::parse(json!({"uid": "1", "scopes": [scope]}).to_string().as_bytes())
    };
    assert!(manifest("8", "8", "9").is_ok());
    assert_eq!(manifest("8", "8", "8"), Err(InvalidManifest::Duplicate("a collection")));
    assert_eq!(manifest("8", "100000000", "9"), Err(InvalidManifest::Id("collection uid")));
    assert_eq!(manifest("x", "8", "9"), Err(InvalidManifest::Id("scope uid")));
    assert!(matches!(Manifest::parse(b"{}"), Err(InvalidManifest::Json { .. })));
}

#[test]
fn manifest_beyond_the_limits_is_refused() {
    let mut manifest = br#"{"uid":"1"}"#.to_vec();
    manifest.resize(MAX_CONFIG_LEN, b' ');
    assert!(Manifest::parse(&manifest).is_ok());
    manifest.push(b' ');
    let too_large = InvalidManifest::TooLarge { len: manifest.len() };
    assert_eq!(Manifest::parse(&manifest), Err(too_large));

    let of = |collections: u32| {
        let collection = |id: u32| format!(r#"{{"name":"c","uid":"{id:x}"}}"#);
        let scope = |name: &str, ids: std::ops::Range<u32>| {
            let collections = ids.map(collection).collect::<Vec<_>>().join(",");
            format!(r#"{{"name":"{name}","uid":"{name}","collections":[{collections}]}}"#)
        };
        let (first, second) = (scope("a", 0..20_000), scope("b", 20_000..collections));
        Manifest::parse(format!(r#"{{"uid":"1","scopes":[{first},{second}]}}"#).as_bytes())
    };
    assert_eq!(of(50_000).unwrap().collections().count(), 50_000);
    assert_eq!(of(50_001), Err(InvalidManifest::Id("number of collections")));
}

#[test]
fn keys_map_to_the_vbuckets_the_sdk_chose() {
    // Writes of the Python SDK, as recorded against a node with 64 vBuckets.
    for (key, vbid) in [("airport::LFPG", 0x3), ("e1", 0xd), ("ctr", 0x8), ("nope", 0x11)] {
        assert_eq!(vbucket_of_key(key.as_bytes(), 64), Vbid(vbid), "{key}");
    }
    assert_eq!(vbucket_of_key(b"key", 0), Vbid(0), "not a division by zero");
}

proptest! {
    #[test]
    fn configuration_and_manifest_parsers_survive_any_bytes(bytes: Vec<u8>) {
        let _ = BucketConfig::parse(&bytes, "seed");
        let _ = GlobalConfig::parse(&bytes, "seed");
        let _ = Manifest::parse(&bytes);
    }

    #[test]
    fn configuration_changed_anywhere_never_names_a_node_it_lacks(
        at in 0_usize..1000, byte: u8,
    ) {
        let mut json = config().to_string().into_bytes();
        let len = json.len();
        json[at % len] = byte;
        if let Ok(config) = BucketConfig::parse(&json, "seed") {
            for vbid in (0..config.num_vbuckets()).map(Vbid) {
                for node in config.active(vbid).into_iter().chain(config.replicas(vbid).flatten()) {
                    prop_assert!(node < config.nodes().len());
                }
            }
        }
    }

    #[test]
    fn connection_string_parser_survives_any_text(text: String) {
        let _ = text.parse::<ConnectionString>();
        let _ = format!("couchbase://{text}").parse::<ConnectionString>();
    }

    #[test]
    fn connection_string_survives_being_written(
        hosts in proptest::collection::vec(("[a-z][a-z0-9.-]{0,10}", 1_u16..8000), 1..4),
        tls: bool,
    ) {
        let hosts: Vec<_> = hosts.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        let text = format!("couchbase{}://{}/b", if tls { "s" } else { "" }, hosts.join(","));
        let parsed: ConnectionString = text.parse().unwrap();
        prop_assert_eq!(parsed.to_string(), text);
    }
}

#[test]
fn node_named_otherwise_by_the_server_list_is_found_by_its_place() {
    // By another name, as behind some proxies, or by the port for TLS only.
    for (services, is_taken) in [
        (json!({"kv": 11999, "mgmt": 8091}), true),
        (json!({"kvSSL": 11207, "mgmt": 8091}), true),
        (json!({"mgmt": 8091}), false),
    ] {
        let config = with(|json| {
            json["nodesExt"][1] = json!({"services": services, "hostname": "elsewhere"});
        });
        let hostname = parse(&config).unwrap().nodes()[1].hostname().to_owned();
        assert_eq!(hostname, if is_taken { "elsewhere" } else { "n1" }, "{services}");
    }
}
