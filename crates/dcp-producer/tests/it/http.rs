use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use dcp_producer::Producer;
use dcp_proto::topology::{BucketConfig, GlobalConfig, Manifest};
use dcp_wire::{Frame, Opcode, Vbid};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::raw_client::RawClient;
use super::{start, start_one};

/// Longest wait for something that must come.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// An answer with its head in lower case.
pub(crate) struct Answer {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(found, _)| *found == name).map(|(_, value)| value).next()
    }

    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        assert_eq!(self.header("content-type"), Some("application/json"));
        serde_json::from_str(&self.body).unwrap()
    }
}

pub(crate) fn basic(username: &str, password: &str) -> String {
    let pair = BASE64_STANDARD.encode(format!("{username}:{password}"));
    format!("Authorization: Basic {pair}\r\n")
}

fn known() -> String {
    basic("Administrator", "password")
}

pub(crate) async fn dial(producer: &Producer, node: usize) -> TcpStream {
    let url = &producer.management_urls()[node];
    TcpStream::connect(url.strip_prefix("http://").unwrap()).await.unwrap()
}

/// What the server answers before it closes the connection.
pub(crate) async fn exchange(
    mut socket: impl AsyncRead + AsyncWriteExt + Unpin,
    request: &[u8],
) -> Answer {
    socket.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    let read = socket.read_to_end(&mut answer);
    tokio::time::timeout(ANSWER_TIMEOUT, read).await.expect("the answer comes").unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("the answer has a head");
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

pub(crate) fn request(method: &str, path: &str, headers: &str) -> Vec<u8> {
    format!("{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n{headers}\r\n")
        .into_bytes()
}

pub(crate) async fn get(producer: &Producer, path: &str) -> Answer {
    exchange(dial(producer, 0).await, &request("GET", path, &known())).await
}

/// Reads the configurations of an endless answer.
pub(crate) struct Configs<S> {
    socket: S,
    input: Vec<u8>,
}

impl<S: AsyncRead + AsyncWriteExt + Unpin> Configs<S> {
    pub(crate) async fn follow(mut socket: S, path: &str) -> Self {
        socket.write_all(&request("GET", path, &known())).await.unwrap();
        let mut configs = Self { socket, input: Vec::new() };
        let head = configs.until(b"\r\n\r\n").await.expect("there is a head");
        let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
        assert!(head.starts_with("http/1.1 200"), "{head}");
        assert!(head.contains("transfer-encoding: chunked"), "{head}");
        configs
    }

    /// What comes before `end`, which is left out; `None` if the connection ends first.
    async fn until(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.input.windows(end.len()).position(|window| window == end) {
                let found = self.input[..at].to_vec();
                self.input.drain(..at + end.len());
                return Some(found);
            }
            let read = self.socket.read_buf(&mut self.input);
            if tokio::time::timeout(ANSWER_TIMEOUT, read).await.expect("more comes").unwrap() == 0 {
                return None;
            }
        }
    }

    /// The next configuration; `None` once there are no more.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        let mut text = Vec::new();
        while !text.ends_with(b"\n\n\n\n") {
            let len = String::from_utf8(self.until(b"\r\n").await?).unwrap();
            let len = usize::from_str_radix(&len, 16).unwrap();
            if len == 0 {
                assert!(text.is_empty(), "the answer ends within a configuration");
                return None;
            }
            while self.input.len() < len + 2 {
                assert_ne!(self.socket.read_buf(&mut self.input).await.unwrap(), 0);
            }
            text.extend(self.input.drain(..len));
            self.input.drain(..2);
        }
        Some(serde_json::from_slice(&text).unwrap())
    }
}

#[tokio::test]
async fn server_reports_what_it_is_and_who_asks() {
    let producer = start_one().await;
    let pools = get(&producer, "/pools").await.json();
    let version = pools["implementationVersion"].as_str().unwrap();
    assert!(version.starts_with("8.0.2-") && version.ends_with("-enterprise"), "{version}");
    assert_eq!(pools["pools"][0]["name"], "default");
    let me = get(&producer, "/whoami").await.json();
    assert_eq!((&me["id"], &me["domain"]), (&"Administrator".into(), &"admin".into()));
}

#[tokio::test]
async fn nodes_are_distinct_and_each_names_itself() {
    let producer = start(|options| options.nodes = 2).await;
    for index in 0..2 {
        let socket = dial(&producer, index).await;
        let pool = exchange(socket, &request("GET", "/pools/default", &known())).await.json();
        let nodes = pool["nodes"].as_array().unwrap();
        assert_eq!(nodes.len(), 2);
        for (other, node) in nodes.iter().enumerate() {
            assert_eq!(node["thisNode"], other == index);
            let url = &producer.management_urls()[other];
            assert_eq!(format!("http://{}", node["hostname"].as_str().unwrap()), *url);
            assert!(node["ports"]["direct"].as_u64().unwrap() > 0);
        }
    }
}

#[tokio::test]
async fn bucket_configuration_is_the_same_over_http_and_kv() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    let map = client.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await;
    let terse = get(&producer, "/pools/default/b/default").await;
    assert_eq!(terse.body.as_bytes(), map.frame().value);
    BucketConfig::parse(terse.body.as_bytes(), "127.0.0.1").unwrap();
    let services = get(&producer, "/pools/default/nodeServices").await;
    GlobalConfig::parse(services.body.as_bytes(), "127.0.0.1").unwrap();
    let scopes = get(&producer, "/pools/default/buckets/default/scopes").await;
    Manifest::parse(scopes.body.as_bytes()).unwrap();
}

#[tokio::test]
async fn bucket_has_its_settings_in_the_full_form() {
    let producer = start_one().await;
    let bucket = get(&producer, "/pools/default/buckets/default").await.json();
    assert_eq!(bucket["name"], "default");
    assert_eq!(bucket["uuid"], producer.bucket_uuid());
    assert_eq!(
        (&bucket["bucketType"], &bucket["storageBackend"]),
        (&"membase".into(), &"couchstore".into())
    );
    assert_eq!(bucket["nodes"][0]["thisNode"], true);
    // SDKs end the process when these are not there.
    assert_eq!(bucket["quota"]["rawRAM"], 8_u64 << 30);
    assert_eq!(bucket["replicaNumber"], 0);
    let settings = ["evictionPolicy", "compressionMode", "conflictResolutionType", "maxTTL"];
    assert!(settings.iter().all(|setting| !bucket[setting].is_null()));
    assert_eq!(get(&producer, "/pools/default/buckets").await.json(), serde_json::json!([bucket]));
    let producer = start(|options| options.ephemeral = true).await;
    let bucket = get(&producer, "/pools/default/buckets/default").await.json();
    assert_eq!(bucket["bucketType"], "ephemeral");
    assert_eq!(
        (&bucket["storageBackend"], &bucket["evictionPolicy"]),
        (&"undefined".into(), &"noEviction".into())
    );
}

#[tokio::test]
async fn http_refuses_what_a_data_service_lacks_in_words_that_sdks_know() {
    let producer = start_one().await;
    let views = "/pools/default/buckets/default/ddocs";
    let refused = get(&producer, views).await;
    assert_eq!((refused.status, &*refused.body), (400, r#"{"error":"no_ddocs_service"}"#));
    for path in ["users", "users/local/joe", "groups", "roles"] {
        let refused = get(&producer, &format!("/settings/rbac/{path}")).await;
        assert_eq!((refused.status, &*refused.body), (404, "Not found."), "{path}");
    }
    producer.drop_bucket().unwrap();
    assert_eq!(get(&producer, views).await.status, 404);
}

#[tokio::test]
async fn bucket_configuration_says_where_it_is_flushed() {
    let producer = start_one().await;
    let bucket = get(&producer, "/pools/default/buckets/default").await.json();
    let flush = bucket["controllers"]["flush"].as_str().unwrap();
    let flushed = exchange(dial(&producer, 0).await, &request("POST", flush, &known())).await;
    assert_eq!(flushed.status, 200, "{}", flushed.body);
}

#[tokio::test]
async fn http_resource_that_does_not_exist_is_not_found() {
    let producer = start_one().await;
    let other = format!("/pools/default/b/default?bucket_uuid={:032x}", 1);
    for path in [
        "/",
        "/nothing",
        "/pools/default/b/other",
        "/pools/default/bs/other",
        "/pools/default/buckets/other/scopes",
        "/pools/default/x/default",
        "/pools/default/b/%ff",
        &other,
    ] {
        assert_eq!(get(&producer, path).await.status, 404, "{path}");
    }
    let same = format!("/pools/default/b/%64efault?bucket_uuid={}", producer.bucket_uuid());
    assert_eq!(get(&producer, &same).await.status, 200);
}

#[tokio::test]
async fn http_requests_without_credentials_learn_nothing() {
    let producer = start_one().await;
    for headers in [
        String::new(),
        basic("Administrator", "wrong"),
        basic("nobody", "password"),
        "Authorization: Bearer x\r\n".to_owned(),
    ] {
        for path in ["/pools", "/pools/default/bs/default", "/nothing"] {
            let socket = dial(&producer, 0).await;
            let refused = exchange(socket, &request("GET", path, &headers)).await;
            assert_eq!((refused.status, &*refused.body), (401, ""), "{path}");
            assert!(refused.header("www-authenticate").unwrap().starts_with("basic realm="));
        }
    }
}

#[tokio::test]
async fn http_changes_nothing_else() {
    let producer = start_one().await;
    for (method, path) in [
        ("PUT", "/pools/default/buckets"),
        ("DELETE", "/pools/default/buckets"),
        ("PATCH", "/pools/default/buckets/default"),
        ("POST", "/pools/default"),
    ] {
        let socket = dial(&producer, 0).await;
        let refused = exchange(socket, &request(method, path, &known())).await;
        assert_eq!((refused.status, refused.header("allow")), (405, Some("get, head")), "{path}");
    }
    let socket = dial(&producer, 0).await;
    let head = exchange(socket, &request("HEAD", "/pools", &known())).await;
    assert_eq!((head.status, &*head.body), (200, ""));
}

pub(crate) async fn send_form(producer: &Producer, method: &str, path: &str, form: &str) -> Answer {
    let headers = format!("{}Content-Length: {}\r\n", known(), form.len());
    let request = [&request(method, path, &headers)[..], form.as_bytes()].concat();
    exchange(dial(producer, 0).await, &request).await
}

#[tokio::test]
async fn bucket_quota_and_flush_can_be_changed() {
    let producer = start_one().await;
    let bucket = "/pools/default/buckets/default";
    let flush = format!("{bucket}/controller/doFlush");
    let post = async |path: &str, form: &str| send_form(&producer, "POST", path, form).await;
    let shown = async || get(&producer, bucket).await.json();
    let same =
        "bucketType=couchbase&replicaNumber=0&replicaIndex=0&maxTTL=0&evictionPolicy=valueOnly";
    let form = format!("ramQuotaMB=345&flushEnabled=0&{same}");
    assert_eq!(post(bucket, &form).await.status, 200);
    let changed = shown().await;
    assert_eq!(changed["quota"]["rawRAM"], 345 << 20);
    assert!(changed["controllers"]["flush"].is_null());
    let refused = post(&flush, "").await;
    assert_eq!((refused.status, refused.body.contains("Flush is disabled")), (400, true));
    for (form, field) in [
        ("ramQuotaMB=99", "ramQuotaMB"),
        ("ramQuotaMB=99999999999999999999", "ramQuotaMB"),
        ("flushEnabled=2", "flushEnabled"),
        ("ramQuotaMB=400&replicaNumber=1", "replicaNumber"),
        ("flushEnabled=1&maxTTL=60", "maxTTL"),
        ("flushEnabled=1&durabilityMinLevel=majority", "durabilityMinLevel"),
    ] {
        let refused = post(bucket, form).await;
        assert_eq!(refused.status, 400, "{form}");
        let reasons: Value = serde_json::from_str(&refused.body).unwrap();
        assert!(reasons["errors"][field].is_string(), "{form}: {reasons}");
    }
    assert_eq!(shown().await, changed, "nothing is changed by halves");
    assert_eq!(post(bucket, "flushEnabled=1").await.status, 200);
    assert_eq!(post(&flush, "").await.status, 200);
    assert_eq!(shown().await["quota"]["rawRAM"], 345 << 20);
    // The quota holds for clients.
    let large = bytes::Bytes::from(vec![b' '; 18 << 20]);
    let write = |n: u8| {
        let options = dcp_producer::WriteOptions::default();
        producer.upsert(&[b'k', n], large.clone(), options)
    };
    assert_eq!(post(bucket, "ramQuotaMB=100").await.status, 200);
    assert_eq!((0..8).filter(|n| write(*n).is_ok()).count(), 5);
    assert_eq!(post(bucket, "ramQuotaMB=200").await.status, 200);
    assert!(write(8).is_ok());
}

#[tokio::test]
async fn bucket_is_flushed_dropped_and_recreated() {
    let producer = start_one().await;
    let ask =
        async |method: &str, path: &str, form: &str| send_form(&producer, method, path, form).await;
    let [buckets, bucket] = ["/pools/default/buckets", "/pools/default/buckets/default"];
    let flush = format!("{bucket}/controller/doFlush");
    producer.upsert(b"key", "1".into(), dcp_producer::WriteOptions::default()).unwrap();
    let branches = producer.failover_logs();
    assert_eq!(ask("POST", &flush, "").await.status, 200);
    assert!(producer.get(b"key").is_none());
    assert!(producer.high_seqnos().into_values().all(|seqno| seqno.0 == 0));
    let is_new = |(vbid, log)| branches[&vbid] != log;
    assert!(producer.failover_logs().into_iter().all(is_new), "each history begins anew");
    let refused = ask("POST", buckets, "name=default").await;
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("already exists"), "{}", refused.body);
    assert_eq!(ask("DELETE", "/pools/default/buckets/other", "").await.status, 404);
    assert_eq!(ask("DELETE", bucket, "").await.status, 200);
    for (method, path) in [("DELETE", bucket), ("POST", &flush)] {
        assert_eq!(ask(method, path, "").await.status, 404);
    }
    let settings = "name=default&ramQuotaMB=345";
    assert_eq!(ask("POST", buckets, "name=default&ramQuotaMB=1").await.status, 400);
    assert_eq!(ask("POST", buckets, settings).await.status, 202);
    assert_eq!(ask("POST", &flush, "").await.status, 400, "nobody asked for flushing");
    assert_eq!(get(&producer, bucket).await.json()["quota"]["rawRAM"], 345 << 20);
    assert!(producer.upsert(b"key", "1".into(), dcp_producer::WriteOptions::default()).is_ok());
}

#[tokio::test]
async fn http_connection_serves_one_request_after_the_other() {
    let producer = start_one().await;
    let mut socket = dial(&producer, 0).await;
    let first = format!("GET /whoami HTTP/1.1\r\nHost: node\r\n{}\r\n", known());
    socket.write_all(first.as_bytes()).await.unwrap();
    let both = exchange(socket, &request("GET", "/whoami", &known())).await;
    assert_eq!(both.status, 200);
    assert!(both.body.contains("HTTP/1.1 200 OK"), "the second answer follows the first");
}

#[tokio::test]
async fn map_that_changes_is_streamed_over_http() {
    let producer = start(|options| options.nodes = 2).await;
    for (path, full) in
        [("/pools/default/bs/default", false), ("/pools/default/bucketsStreaming/default", true)]
    {
        let mut configs = Configs::follow(dial(&producer, 1).await, path).await;
        let first = configs.next().await.unwrap();
        assert_eq!(first.get("evictionPolicy").is_some(), full, "{path}");
        assert_eq!(first["nodesExt"][1]["thisNode"], true);
        let owner = first["vBucketServerMap"]["vBucketMap"][0][0].as_u64().unwrap();
        let next = 1 - usize::try_from(owner).unwrap();
        producer.move_vbucket(Vbid(0), next).unwrap();
        let second = configs.next().await.unwrap();
        assert_eq!(second["vBucketServerMap"]["vBucketMap"][0][0], next);
        assert!(second["rev"].as_u64() > first["rev"].as_u64());
    }
}

#[tokio::test]
async fn http_shutdown_ends_streaming_and_idle_connections() {
    let producer = start_one().await;
    let mut configs = Configs::follow(dial(&producer, 0).await, "/pools/default/bs/default").await;
    configs.next().await.unwrap();
    let mut idle = dial(&producer, 0).await;
    tokio::time::timeout(ANSWER_TIMEOUT, producer.shutdown()).await.expect("the cluster stops");
    assert!(configs.next().await.is_none());
    assert!(matches!(idle.read(&mut [0; 16]).await, Ok(0) | Err(_)));
}

#[tokio::test]
async fn http_garbage_and_endless_heads_harm_nobody_else() {
    let producer = start_one().await;
    let mut configs = Configs::follow(dial(&producer, 0).await, "/pools/default/bs/default").await;
    configs.next().await.unwrap();
    let endless = format!("GET /pools HTTP/1.1\r\nX: {}", "x".repeat(64 << 10));
    let many: String = (0..1000).map(|index| format!("X{index}: x\r\n")).collect();
    let many = format!("GET /pools HTTP/1.1\r\n{many}\r\n");
    let garbage: [&[u8]; 5] = [
        &[0x80, 0x1f, 0, 0],
        b"\0\xff\r\n\r\n",
        b"GET\r\n\r\n",
        endless.as_bytes(),
        many.as_bytes(),
    ];
    for bytes in garbage {
        let mut socket = dial(&producer, 0).await;
        // The server may close before it has read all.
        let _ = socket.write_all(bytes).await;
        let _ = socket.shutdown().await;
        let mut answer = Vec::new();
        let read = socket.read_to_end(&mut answer);
        let _ = tokio::time::timeout(ANSWER_TIMEOUT, read).await.expect("the connection is closed");
        assert!(!answer.starts_with(b"HTTP/1.1 2"));
    }
    assert_eq!(get(&producer, "/pools").await.status, 200);
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    client.succeed(Frame::request(Opcode::NOOP)).await;
}

#[tokio::test]
async fn http_connections_are_limited() {
    let producer = start(|options| options.max_connections = 1).await;
    let mut first = Configs::follow(dial(&producer, 0).await, "/pools/default/bs/default").await;
    first.next().await.unwrap();
    let mut second = dial(&producer, 0).await;
    assert!(matches!(second.read(&mut [0; 16]).await, Ok(0) | Err(_)), "it is closed at once");
    drop(first);
    let again = async {
        loop {
            let mut socket = dial(&producer, 0).await;
            let _ = socket.write_all(&request("GET", "/pools", &known())).await;
            let mut answer = Vec::new();
            if socket.read_to_end(&mut answer).await.is_ok() && !answer.is_empty() {
                break;
            }
        }
    };
    tokio::time::timeout(ANSWER_TIMEOUT, again).await.expect("room is made when a connection ends");
}

#[tokio::test]
async fn scopes_and_collections_are_made_changed_and_dropped() {
    let producer = start_one().await;
    let ask = async |method: &str, path: &str, form: &str| {
        let path = format!("/pools/default/buckets/{path}");
        let headers = format!("{}Content-Length: {}\r\n", known(), form.len());
        let request = [request(method, &path, &headers), form.as_bytes().to_vec()].concat();
        exchange(dial(&producer, 0).await, &request).await
    };
    let made = ask("POST", "default/scopes", "name=shop").await.json();
    assert_eq!(
        made["uid"],
        Manifest::parse(producer.manifest_json().as_bytes()).unwrap().uid().to_string()
    );
    for (method, path, form, status, said) in [
        ("POST", "default/scopes", "name=shop", 400, "Scope with name \\\"shop\\\" already exists"),
        ("POST", "default/scopes", "name=_shop", 400, "does not begin with"),
        ("POST", "default/scopes", "", 400, "1 to 251"),
        ("POST", "other/scopes", "name=shop", 404, "not found"),
        ("POST", "default/scopes/none/collections", "name=a", 404, "Scope with name"),
        ("POST", "default/scopes/shop/collections", "name=a+b", 400, "letters"),
        ("DELETE", "default/scopes/shop/collections/a", "", 404, "Collection with name"),
        ("DELETE", "default/scopes/none", "", 404, "is not found"),
        ("DELETE", "default/scopes/_default", "", 400, "cannot be dropped"),
        ("PUT", "default/scopes", "name=a", 405, ""),
        ("POST", "default/scopes/shop", "name=a", 405, ""),
    ] {
        let answer = ask(method, path, form).await;
        assert_eq!(answer.status, status, "{method} {path} {form}: {}", answer.body);
        assert!(answer.body.contains(said), "{method} {path} {form}: {}", answer.body);
    }
    let long = format!("name={}", "a".repeat(5000));
    assert_eq!(ask("POST", "default/scopes", &long).await.status, 413);
    let stranger = request("DELETE", "/pools/default/buckets/default/scopes/shop", "");
    assert_eq!(exchange(dial(&producer, 0).await, &stranger).await.status, 401);

    ask("POST", "default/scopes/shop/collections", "name=carts&maxTTL=60").await.json();
    let find = |field: &str| {
        let manifest: Value = serde_json::from_str(&producer.manifest_json()).unwrap();
        let scopes = manifest["scopes"].as_array().unwrap();
        let shop = scopes.iter().find(|scope| scope["name"] == "shop")?;
        Some(shop["collections"].get(0)?[field].clone())
    };
    assert_eq!((find("name"), find("maxTTL")), (Some("carts".into()), Some(60.into())));
    ask("PATCH", "default/scopes/shop/collections/carts", "maxTTL=9&history=true").await.json();
    assert_eq!((find("maxTTL"), find("history")), (Some(9.into()), Some(true.into())));
    ask("DELETE", "default/scopes/shop/collections/carts", "").await.json();
    assert_eq!(find("name"), None);
    ask("DELETE", "default/scopes/shop", "").await.json();
    assert!(producer.collection_id("shop", "carts").is_err());
}
