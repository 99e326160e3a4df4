use bytes::BytesMut;
use dcp_test::login::{CONFIG, Login, PASSWORD, USERNAME};
use dcp_test::packet::{Packet, encoded, packets};
use dcp_wire::DecodeError;
use dcp_wire::message::{Control, Open, OpenFlags};
use dcp_wire::sasl::SaslError;
use proptest::prelude::*;

use super::*;
use crate::topology::InvalidConfig;

fn config() -> BootstrapConfig {
    let auth = Auth::Password {
        username: USERNAME.to_owned(),
        password: Zeroizing::new(PASSWORD.to_owned()),
        nonce: "clientNonceOf24Characters".to_owned(),
        mechanisms: Mechanism::SCRAM.to_vec(),
    };
    let mut config = BootstrapConfig::new(auth, Some("default".to_owned()), "10.0.0.1");
    config.dcp = Some(DcpOpen::new("name", OpenFlags::INCLUDE_DELETE_TIMES, 1024, 20));
    config
}

/// What it sends.
fn drain(bootstrap: &mut Bootstrap) -> Vec<Packet> {
    let mut out = BytesMut::new();
    while bootstrap.poll_transmit(&mut out) {}
    packets(&out)
}

fn feed(bootstrap: &mut Bootstrap, bytes: &[u8]) -> Result<(), BootstrapError> {
    bootstrap.handle_bytes(&mut BytesMut::from(bytes))
}

/// Runs a bootstrap to its end; one list of requests per round trip.
fn run(server: &mut Login, bootstrap: &mut Bootstrap) -> Result<Vec<Vec<Opcode>>, BootstrapError> {
    let mut rounds = Vec::new();
    while !bootstrap.is_done() {
        let requests = drain(bootstrap);
        assert!(!requests.is_empty(), "stuck: {bootstrap:?}");
        rounds.push(requests.iter().map(Packet::opcode).collect());
        for request in requests {
            feed(bootstrap, &server.answer(&request))?;
        }
    }
    Ok(rounds)
}

fn failure(server: &mut Login, config: BootstrapConfig) -> BootstrapError {
    let mut bootstrap = Bootstrap::new(config).unwrap();
    run(server, &mut bootstrap).unwrap_err()
}

#[test]
fn connection_is_set_up_in_four_round_trips() {
    let mut server = Login::default();
    let mut bootstrap = Bootstrap::new(config()).unwrap();
    let rounds = run(&mut server, &mut bootstrap).unwrap();
    assert_eq!(
        rounds,
        [
            vec![Opcode::HELLO, Opcode::SASL_LIST_MECHS],
            vec![Opcode::SASL_AUTH],
            vec![
                Opcode::SASL_STEP,
                Opcode::SELECT_BUCKET,
                Opcode::GET_CLUSTER_CONFIG,
                Opcode::GET_COLLECTIONS_MANIFEST
            ],
            [vec![Opcode::DCP_OPEN], vec![Opcode::DCP_CONTROL; 7]].concat(),
        ]
    );
    let outcome = bootstrap.take_outcome().unwrap();
    let bucket = outcome.config.bucket().unwrap();
    assert_eq!((bucket.name(), bucket.num_vbuckets()), ("default", 2));
    assert_eq!(bucket.nodes()[0].hostname(), "10.0.0.1");
    assert_eq!(outcome.manifest.as_ref().unwrap().uid().0, 2);
    assert!(outcome.has_feature(Feature::COLLECTIONS));
    assert!(outcome.has_control(Control::MAX_MARKER_VERSION));
    assert!(bootstrap.take_outcome().is_none(), "handed out once");
}

#[test]
fn noops_are_turned_on_before_anything_that_needs_them() {
    let mut server = Login::default();
    run(&mut server, &mut Bootstrap::new(config()).unwrap()).unwrap();
    let control = server.seen.iter().find(|seen| seen.opcode() == Opcode::DCP_CONTROL).unwrap();
    let control = control.frame();
    assert_eq!((control.key, control.value), (&b"enable_noop"[..], &b"true"[..]));
}

#[test]
fn sasl_mechanism_is_the_strongest_and_the_password_stays_here() {
    for (offered, chosen) in [
        (&b"PLAIN SCRAM-SHA1 SCRAM-SHA512 SCRAM-SHA256"[..], &b"SCRAM-SHA512"[..]),
        (b"OAUTHBEARER SCRAM-SHA1 SCRAM-SHA256", b"SCRAM-SHA256"),
        (b"SCRAM-SHA1", b"SCRAM-SHA1"),
    ] {
        let mut server = Login { mechanisms: offered, ..Login::default() };
        run(&mut server, &mut Bootstrap::new(config()).unwrap()).unwrap();
        let auth = server.seen.iter().find(|seen| seen.opcode() == Opcode::SASL_AUTH).unwrap();
        assert_eq!(auth.frame().key, chosen);
        for request in &server.seen {
            assert!(!request.frame().value.windows(6).any(|part| part == b"secret"), "{request:?}");
        }
    }
}

#[test]
fn plain_is_used_only_where_it_is_allowed() {
    let mut server = Login { mechanisms: b"PLAIN", ..Login::default() };
    let error = failure(&mut server, config());
    assert_eq!(error, BootstrapError::Sasl(SaslError::NoMechanism));

    let mut allowed = config();
    let Auth::Password { mechanisms, .. } = &mut allowed.auth else { unreachable!() };
    mechanisms.insert(0, Mechanism::Plain);
    let mut server = Login { mechanisms: b"SCRAM-SHA512 PLAIN", ..Login::default() };
    let rounds = run(&mut server, &mut Bootstrap::new(allowed).unwrap()).unwrap();
    assert_eq!(rounds.len(), 3, "PLAIN saves a round trip");
}

#[test]
fn sasl_mechanism_that_is_refused_is_not_followed_by_another() {
    let mut both = config();
    let Auth::Password { mechanisms, .. } = &mut both.auth else { unreachable!() };
    mechanisms.insert(0, Mechanism::Plain);
    let mut server = Login::answering(Opcode::SASL_AUTH, Status::AUTH_ERROR, b"");
    let error = failure(&mut server, both);
    assert!(matches!(error, BootstrapError::AuthenticationFailed { .. }), "{error:?}");
    let tried = server.seen.iter().filter(|seen| seen.opcode() == Opcode::SASL_AUTH);
    let tried: Vec<_> = tried.map(|seen| seen.frame().key.to_vec()).collect();
    assert_eq!(tried, [b"PLAIN".to_vec()], "SCRAM was offered too");
}

#[test]
fn password_that_is_wrong_is_an_authentication_failure() {
    let mut wrong = config();
    let Auth::Password { password, .. } = &mut wrong.auth else { unreachable!() };
    *password = Zeroizing::new("guess".to_owned());
    let error = failure(&mut Login::default(), wrong);
    assert!(matches!(error, BootstrapError::AuthenticationFailed { .. }), "{error:?}");
}

#[test]
fn server_that_does_not_know_the_password_is_not_trusted() {
    let mut forged = Login::answering(Opcode::SASL_STEP, Status::SUCCESS, b"v=AAAA");
    let error = failure(&mut forged, config());
    assert!(matches!(error, BootstrapError::Sasl(SaslError::ServerSignature)), "{error:?}");

    let mut skipped = Login::answering(Opcode::SASL_AUTH, Status::SUCCESS, b"");
    assert_eq!(
        failure(&mut skipped, config()),
        BootstrapError::Sasl(SaslError::ServerSignature),
        "a server may not leave the proof out"
    );
}

fn with_token(text: &str) -> BootstrapConfig {
    let token = crate::consumer::Token::new(text.to_owned()).unwrap();
    BootstrapConfig { auth: Auth::Token(token), ..config() }
}

fn with_tokens() -> Login {
    Login { mechanisms: b"SCRAM-SHA512 PLAIN OAUTHBEARER", ..Login::default() }
}

#[test]
fn tk_02_and_tk_03_token_is_sent_at_once_where_it_is_accepted() {
    let mut bootstrap = Bootstrap::new(with_token(PASSWORD)).unwrap();
    assert!(!format!("{:?}", with_token(PASSWORD)).contains(PASSWORD));
    let rounds = run(&mut with_tokens(), &mut bootstrap).unwrap();
    let second = [
        Opcode::SASL_AUTH,
        Opcode::SELECT_BUCKET,
        Opcode::GET_CLUSTER_CONFIG,
        Opcode::GET_COLLECTIONS_MANIFEST,
    ];
    assert_eq!((rounds.len(), &rounds[1][..]), (3, &second[..]));
    let mut older = Login::default();
    assert_eq!(failure(&mut older, with_token(PASSWORD)), BootstrapError::NoTokens);
    assert!(!older.was_asked(Opcode::SASL_AUTH), "it stays here");
}

#[test]
fn tk_04_and_tk_10_token_that_is_refused_or_stale_is_told_apart_from_a_password() {
    let refused = |status, answer: &'static [u8]| {
        let instead = vec![(Opcode::SASL_AUTH, status, answer)];
        failure(&mut Login { instead, ..with_tokens() }, with_token(PASSWORD))
    };
    let error = failure(&mut with_tokens(), with_token("another"));
    let context = ErrorContext::default();
    assert_eq!(error, BootstrapError::TokenRefused { status: Status::AUTH_ERROR, context });
    // What a server answers to one that it cannot read, and an exchange that it does not have.
    for status in [Status::EINVAL, Status::AUTH_CONTINUE, Status::AUTH_STALE, Status::EACCESS] {
        let error = refused(status, br#"{"error":{"context":"no issuer"}}"#);
        assert!(matches!(error, BootstrapError::TokenRefused { .. }), "{error:?}");
        assert!(error.to_string().ends_with(": no issuer)"), "{error}");
        assert_eq!(error.status(), Some(status));
    }
    let busy = refused(Status::ETMPFAIL, b"");
    assert!(matches!(busy, BootstrapError::Status { .. }), "{busy:?}");
    for opcode in [Opcode::SELECT_BUCKET, Opcode::GET_CLUSTER_CONFIG, Opcode::DCP_OPEN] {
        let instead = vec![(opcode, Status::AUTH_STALE, &b""[..])];
        let error = failure(&mut Login { instead, ..with_tokens() }, with_token(PASSWORD));
        assert_eq!(error, BootstrapError::TokenStale, "{opcode}");
        assert_eq!(error.status(), Some(Status::AUTH_STALE));
    }
}

#[test]
fn client_certificate_needs_no_sasl() {
    let mut server = Login::default();
    let mut certified = config();
    certified.auth = Auth::Certificate;
    run(&mut server, &mut Bootstrap::new(certified).unwrap()).unwrap();
    assert!(!server.was_asked(Opcode::SASL_AUTH));
}

#[test]
fn bootstrap_without_a_bucket_fetches_the_global_configuration() {
    let mut server = Login::default();
    let mut global = config();
    (global.bucket, global.dcp) = (None, None);
    let mut bootstrap = Bootstrap::new(global).unwrap();
    run(&mut server, &mut bootstrap).unwrap();
    let outcome = bootstrap.take_outcome().unwrap();
    assert!(matches!(outcome.config, ClusterConfig::Global(_)));
    assert!(outcome.manifest.is_none());
    assert!(!server.was_asked(Opcode::DCP_OPEN));
}

#[test]
fn bootstrap_steps_that_are_refused_have_their_own_errors() {
    let bucket = || "default".to_owned();
    let refused = |opcode, status| failure(&mut Login::answering(opcode, status, b""), config());
    assert_eq!(
        refused(Opcode::SELECT_BUCKET, Status::KEY_ENOENT),
        BootstrapError::BucketNotFound { bucket: bucket() }
    );
    assert_eq!(
        refused(Opcode::SELECT_BUCKET, Status::EACCESS),
        BootstrapError::BucketAccess { bucket: bucket() }
    );
    assert_eq!(
        refused(Opcode::SELECT_BUCKET, Status::NOT_SUPPORTED),
        BootstrapError::FeatureMissing(Feature::COLLECTIONS)
    );
    assert_eq!(
        refused(Opcode::GET_CLUSTER_CONFIG, Status::KEY_ENOENT),
        BootstrapError::NoConfig { status: Status::KEY_ENOENT }
    );
    assert_eq!(
        refused(Opcode::GET_CLUSTER_CONFIG, Status::ETMPFAIL).status(),
        Some(Status::ETMPFAIL)
    );
    assert_eq!(refused(Opcode::DCP_OPEN, Status::EACCESS), BootstrapError::DcpAccess);
    assert_eq!(
        refused(Opcode::HELLO, Status::UNKNOWN_COMMAND),
        BootstrapError::Status {
            opcode: Opcode::HELLO,
            status: Status::UNKNOWN_COMMAND,
            context: ErrorContext::default()
        }
    );
    let error = refused(Opcode::DCP_CONTROL, Status::EINVAL);
    assert!(matches!(error, BootstrapError::ControlRefused { key: "enable_noop", .. }), "{error}");
}

#[test]
fn bootstrap_refusal_keeps_the_status_of_the_answer() {
    for (opcode, status) in [
        (Opcode::HELLO, Status::UNKNOWN_COMMAND),
        (Opcode::SASL_AUTH, Status::AUTH_ERROR),
        (Opcode::SELECT_BUCKET, Status::KEY_ENOENT),
        (Opcode::SELECT_BUCKET, Status::EACCESS),
        (Opcode::GET_CLUSTER_CONFIG, Status::KEY_ENOENT),
        (Opcode::GET_CLUSTER_CONFIG, Status::NO_BUCKET),
        (Opcode::GET_CLUSTER_CONFIG, Status::ECONFIG_ONLY),
        (Opcode::DCP_OPEN, Status::EACCESS),
        (Opcode::DCP_CONTROL, Status::EINVAL),
    ] {
        let error = failure(&mut Login::answering(opcode, status, b""), config());
        assert_eq!(error.status(), Some(status), "{error}");
    }
    assert_eq!(BootstrapError::FeatureMissing(Feature::COLLECTIONS).status(), None);
    assert_eq!(BootstrapError::TooLong { what: "the password" }.status(), None);
}

#[test]
fn bootstrap_refusal_passes_on_what_the_server_says() {
    let shown = |opcode, status, body| {
        failure(&mut Login::answering(opcode, status, body), config()).to_string()
    };
    assert_eq!(
        shown(Opcode::SASL_AUTH, Status::AUTH_ERROR, br#"{"error":{"ref":"60d81660-ea47"}}"#),
        "authentication failed: check user name and password: reference 60d81660-ea47"
    );
    let context = br#"{"error":{"context":"bad\u001b[31m interval","ref":"1"}}"#;
    let text = shown(Opcode::DCP_CONTROL, Status::EINVAL, context);
    assert!(text.ends_with("(EINVAL: bad [31m interval, reference 1)"), "{text}");
    let long =
        ErrorContext::of(format!(r#"{{"error":{{"context":"{}"}}}}"#, "x".repeat(9000)).as_bytes());
    assert!(long.to_string().len() <= 302);
    for nothing in [&b""[..], b"{}", b"[]", br#"{"error":{}}"#, br#"{"error":{"context":3}}"#] {
        assert_eq!(ErrorContext::of(nothing).to_string(), "");
    }
}

#[test]
fn configuration_of_the_longest_length_is_read_and_a_longer_body_is_not() {
    let longest = 10 << 20;
    for len in [longest, MAX_BODY_LEN + 1] {
        let mut config_json = CONFIG.to_vec();
        config_json.resize(len, b' ');
        let config_json = Box::leak(config_json.into_boxed_slice());
        let (opcode, status) = (Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS);
        let mut server = Login::answering(opcode, status, config_json);
        let done = run(&mut server, &mut Bootstrap::new(config()).unwrap());
        if len == longest {
            assert!(done.is_ok(), "{done:?}");
        } else {
            let [len, max] = [len, MAX_BODY_LEN].map(|len| u32::try_from(len).unwrap());
            let too_large = DecodeError::FrameTooLarge { len, max };
            assert_eq!(done.unwrap_err(), BootstrapError::Decode(too_large));
        }
    }
}

#[test]
fn configuration_that_is_unusable_is_an_error() {
    let mut server = Login::answering(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS, b"{");
    assert!(matches!(
        failure(&mut server, config()),
        BootstrapError::Config(InvalidConfig::Json { .. })
    ));
    let mut server = Login::answering(Opcode::GET_COLLECTIONS_MANIFEST, Status::SUCCESS, b"[]");
    assert!(matches!(failure(&mut server, config()), BootstrapError::Manifest(_)));
}

#[test]
fn server_without_a_manifest_has_the_default_collection() {
    for status in [Status::NO_COLLECTIONS_MANIFEST, Status::UNKNOWN_COMMAND] {
        let mut server = Login::answering(Opcode::GET_COLLECTIONS_MANIFEST, status, b"");
        let mut bootstrap = Bootstrap::new(config()).unwrap();
        run(&mut server, &mut bootstrap).unwrap();
        assert_eq!(bootstrap.take_outcome().unwrap().manifest, Some(Manifest::default()));
    }
}

#[test]
fn features_that_were_not_requested_are_not_used() {
    let extra = [Feature::UNORDERED_EXECUTION, Feature(0x7777), Feature::XERROR, Feature::XERROR];
    let features = Some([&BootstrapConfig::FEATURES[..], &extra].concat());
    let mut server = Login { features, ..Login::default() };
    let mut bootstrap = Bootstrap::new(config()).unwrap();
    run(&mut server, &mut bootstrap).unwrap();
    assert_eq!(bootstrap.take_outcome().unwrap().features, BootstrapConfig::FEATURES);
}

#[test]
fn server_without_collections_is_sent_nothing_that_needs_them() {
    let mut server = Login { features: Some(vec![Feature::XERROR]), ..Login::default() };
    let mut bootstrap = Bootstrap::new(config()).unwrap();
    run(&mut server, &mut bootstrap).unwrap();
    let outcome = bootstrap.take_outcome().unwrap();
    assert!(outcome.manifest.is_none());
    assert!(!server.seen.iter().any(|seen| seen.frame().key == b"max_marker_version"));

    // Nothing is missing that was agreed on, so the refusal is told as it is.
    let mut refusing = Login {
        features: Some(vec![Feature::XERROR]),
        ..Login::answering(Opcode::SELECT_BUCKET, Status::NOT_SUPPORTED, b"")
    };
    let error = failure(&mut refusing, config());
    assert_eq!(error.status(), Some(Status::NOT_SUPPORTED), "{error}");

    let mut strict = config();
    strict.required_features.push(Feature::COLLECTIONS);
    assert_eq!(failure(&mut server, strict), BootstrapError::FeatureMissing(Feature::COLLECTIONS));
    let mut strict = config();
    let setting = ControlSetting::required("x", 1).needing(Feature::COLLECTIONS);
    strict.dcp = strict.dcp.map(|dcp| dcp.with(setting));
    assert_eq!(failure(&mut server, strict), BootstrapError::FeatureMissing(Feature::COLLECTIONS));
}

#[test]
fn settings_unknown_to_a_server_are_skipped_and_busy_ones_are_not() {
    let open = DcpOpen { controls: vec![], ..DcpOpen::new("n", OpenFlags::empty(), 0, 0) };
    let open = open.with(ControlSetting::optional("unknown", 1));
    let lenient = || BootstrapConfig { dcp: Some(open.clone()), ..config() };
    let mut server = Login::answering(Opcode::DCP_CONTROL, Status::EINVAL, b"");
    let mut bootstrap = Bootstrap::new(lenient()).unwrap();
    run(&mut server, &mut bootstrap).unwrap();
    assert!(bootstrap.take_outcome().unwrap().controls.is_empty());
    let mut server = Login::answering(Opcode::DCP_CONTROL, Status::ETMPFAIL, b"");
    let error = failure(&mut server, lenient());
    assert!(matches!(error, BootstrapError::ControlRefused { key: "unknown", .. }), "{error}");
}

#[test]
fn bootstrap_answers_may_come_in_any_order_and_twice() {
    let mut server = Login::default();
    let mut bootstrap = Bootstrap::new(config()).unwrap();
    while !bootstrap.is_done() {
        let requests = drain(&mut bootstrap);
        let answers: Vec<_> = requests.iter().map(|request| server.answer(request)).collect();
        for answer in answers.iter().rev() {
            feed(&mut bootstrap, answer).unwrap();
            feed(&mut bootstrap, answer).unwrap();
        }
    }
    assert!(bootstrap.take_outcome().is_some());
}

#[test]
fn bootstrap_answer_to_no_request_is_an_error() {
    let stray = |opcode, opaque| {
        let mut bootstrap = Bootstrap::new(config()).unwrap();
        let answer = Frame::response(opcode, Status::SUCCESS).with_opaque(Opaque(opaque));
        feed(&mut bootstrap, &encoded(&answer)).unwrap_err()
    };
    let opcode = Opcode::HELLO;
    assert_eq!(stray(opcode, 99), BootstrapError::Unexpected { opcode });
    let opcode = Opcode::GET;
    assert_eq!(stray(opcode, 1), BootstrapError::Unexpected { opcode }, "another request's opaque");
}

#[test]
fn bootstrap_refuses_any_request_but_a_noop() {
    for opcode in [Opcode::DCP_MUTATION, Opcode::DCP_STREAM_END, Opcode::GET] {
        let mut bootstrap = Bootstrap::new(config()).unwrap();
        drain(&mut bootstrap);
        let error = bootstrap.handle_frame(&Frame::request(opcode)).unwrap_err();
        assert_eq!(error, BootstrapError::Unexpected { opcode });
        assert!(drain(&mut bootstrap).is_empty());
    }
}

#[test]
fn bootstrap_that_failed_stays_failed() {
    let mut server = Login::answering(Opcode::SELECT_BUCKET, Status::KEY_ENOENT, b"");
    let mut bootstrap = Bootstrap::new(config()).unwrap();
    let error = run(&mut server, &mut bootstrap).unwrap_err();
    let frame = Frame::response(Opcode::HELLO, Status::SUCCESS);
    assert_eq!(bootstrap.handle_frame(&frame).unwrap_err(), error);
    assert!(drain(&mut bootstrap).is_empty());
    assert!(bootstrap.take_outcome().is_none());
}

#[test]
fn configuration_that_is_pushed_counts_if_it_is_newer() {
    let of_rev = |rev: &str| String::from_utf8(CONFIG.to_vec()).unwrap().replace(r#""rev":3"#, rev);
    let (newer, older) = (of_rev(r#""rev":4"#), of_rev(r#""rev":2"#));
    let push = |bucket: &[u8], value: &[u8]| {
        let push = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_key(bucket);
        encoded(&push.with_value(value))
    };
    let mut after_a_broken_one = push(b"default", b"{broken");
    after_a_broken_one.extend_from_slice(&push(b"default", newer.as_bytes()));
    for (pushed, rev) in [
        (push(b"default", newer.as_bytes()), 4),
        (after_a_broken_one, 4),
        (push(b"default", older.as_bytes()), 3),
        (push(b"other", newer.as_bytes()), 3),
        (push(b"default", b"{broken"), 3),
        (push(b"default", b""), 3),
    ] {
        let mut bootstrap = Bootstrap::new(config()).unwrap();
        feed(&mut bootstrap, &pushed).unwrap();
        run(&mut Login::default(), &mut bootstrap).unwrap();
        assert_eq!(bootstrap.take_outcome().unwrap().config.revision().rev, rev);
    }
}

#[test]
fn noop_is_answered_during_bootstrap() {
    let mut bootstrap = Bootstrap::new(config()).unwrap();
    drain(&mut bootstrap);
    let noop = Frame::request(Opcode::DCP_NOOP).with_opaque(Opaque(0xabcd));
    bootstrap.handle_frame(&noop).unwrap();
    let answers = drain(&mut bootstrap);
    assert_eq!((answers[0].opcode(), answers[0].opaque()), (Opcode::DCP_NOOP, Opaque(0xabcd)));
}

#[test]
fn bootstrap_leaves_bytes_after_its_last_answer_alone() {
    let mut server = Login::default();
    let mut bootstrap = Bootstrap::new(config()).unwrap();
    while !bootstrap.is_done() {
        let mut bytes = BytesMut::new();
        for request in drain(&mut bootstrap) {
            bytes.extend_from_slice(&server.answer(&request));
        }
        bytes.extend_from_slice(b"\x80leftover");
        bootstrap.handle_bytes(&mut bytes).unwrap();
        assert_eq!(&bytes[..], b"\x80leftover");
    }
}

#[test]
fn bootstrap_recognises_another_protocol_by_its_first_byte() {
    let mut bootstrap = Bootstrap::new(config()).unwrap();
    let mut http = BytesMut::from(&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..]);
    assert_eq!(
        bootstrap.handle_bytes(&mut http).unwrap_err(),
        BootstrapError::Decode(DecodeError::InvalidMagic(b'H'))
    );
}

#[test]
fn connection_name_fits_what_servers_take() {
    for (character, len, longest) in [("a", 1000, 1), ("\u{1}", 500, 6), ("ü", 300, 2), ("", 0, 0)]
    {
        let agent = character.repeat(len);
        let mut named = config();
        named.agent = agent;
        named.connection_id = "0123456789abcdef/0123456789abcdef-and-more".to_owned();
        let hello = drain(&mut Bootstrap::new(named).unwrap()).remove(0);
        let name = hello.frame().key;
        assert!(name.len() <= 200, "{}", name.len());
        // No name is cut shorter than it must be: one more character would be too long.
        assert!(len == 0 || name.len() > 200 - longest, "{}", name.len());
        let json: serde_json::Value = serde_json::from_slice(name).unwrap();
        assert_eq!(json["i"], "0123456789abcdef/0123456789abcdef");
    }
    let mut nameless = config();
    nameless.dcp = Some(DcpOpen::new("", OpenFlags::empty(), 0, 20));
    assert!(matches!(Bootstrap::new(nameless), Err(BootstrapError::TooLong { .. })));
}

#[test]
fn bucket_name_that_fits_no_packet_is_refused() {
    let mut named = config();
    named.bucket = Some("b".repeat(1 << 16));
    let error = failure(&mut Login::default(), named);
    assert_eq!(error, BootstrapError::TooLong { what: "the bucket name" });
}

#[test]
fn bootstrap_shows_no_secret() {
    let mut bootstrap = Bootstrap::new(config()).unwrap();
    let shown = format!("{:?} {:?}", config(), bootstrap);
    assert!(!shown.contains("secret") && !shown.contains("clientNonce"), "{shown}");
    assert!(shown.contains(USERNAME) && shown.contains("Negotiate"), "{shown}");
    let mut wrong = Login::answering(Opcode::SASL_STEP, Status::AUTH_ERROR, b"secret");
    let error = run(&mut wrong, &mut bootstrap).unwrap_err();
    assert!(!format!("{error} {error:?} {bootstrap:?}").contains("secret"));
}

#[test]
fn bootstrap_understands_the_recorded_answers_of_a_real_server() {
    let trace = include_str!("../../../../../tests/traces/8.0.2-sdk-python-scram.jsonl");
    let lines: Vec<serde_json::Value> =
        trace.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let packets = lines.iter().filter(|line| line["conn"] == 1 && line["hex"].is_string());
    let decode = |line: &serde_json::Value| {
        let hex = line["hex"].as_str().unwrap();
        let digits = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16));
        (line["dir"] == "c2s", digits.collect::<Result<Vec<_>, _>>().unwrap())
    };
    let packets: Vec<(bool, Vec<u8>)> = packets.map(decode).take(20).collect();
    let sent = |from_client, opcode: Opcode| {
        let matches = |p: &&(bool, Vec<u8>)| p.0 == from_client && p.1[1] == opcode.0;
        packets.iter().find(matches).map(|(_, bytes)| bytes.clone())
    };
    let first = sent(true, Opcode::SASL_AUTH).unwrap();
    let first = Frame::parse(&first, MAX_BODY_LEN).unwrap().unwrap().0;
    let nonce = str::from_utf8(first.value).unwrap().split_once(",r=").unwrap().1.to_owned();

    let auth = Auth::Password {
        username: "@admin".to_owned(),
        password: Zeroizing::new("password".to_owned()),
        nonce,
        mechanisms: Mechanism::SCRAM.to_vec(),
    };
    let mut config = BootstrapConfig::new(auth, Some("default".to_owned()), "127.0.0.1");
    config.manifest = false;
    let mut bootstrap = Bootstrap::new(config).unwrap();
    while !bootstrap.is_done() {
        for request in drain(&mut bootstrap) {
            if request.opcode() == Opcode::SASL_STEP {
                let proof = sent(true, Opcode::SASL_STEP).unwrap();
                let proof = Frame::parse(&proof, MAX_BODY_LEN).unwrap().unwrap().0;
                assert_eq!(request.frame().value, proof.value, "the proof the SDK gave");
            }
            let mut answer = BytesMut::from(&sent(false, request.opcode()).unwrap()[..]);
            answer[12..16].copy_from_slice(&request.opaque().0.to_be_bytes());
            bootstrap.handle_bytes(&mut answer).unwrap();
        }
    }
    let outcome = bootstrap.take_outcome().unwrap();
    assert_eq!(outcome.config.bucket().unwrap().num_vbuckets(), 64);
    assert!(outcome.has_feature(Feature::COLLECTIONS));
}

proptest! {
    #[test]
    fn bootstrap_survives_any_bytes(chunks in proptest::collection::vec(any::<Vec<u8>>(), 0..8)) {
        let mut bootstrap = Bootstrap::new(config()).unwrap();
        for chunk in chunks {
            let _ = bootstrap.handle_bytes(&mut BytesMut::from(&chunk[..]));
        }
    }

    #[test]
    fn bootstrap_survives_any_answer(
        answers in proptest::collection::vec(
            (0..12_u32, prop::sample::select(vec![0x1f_u8, 0x20, 0x21, 0x22, 0x89, 0xb5, 0xba, 0x50, 0x5e]),
             prop::sample::select(vec![0_u16, 0, 0, 0x21, 0x20, 4]),
             any::<Vec<u8>>()),
            0..30,
        ),
    ) {
        let mut bootstrap = Bootstrap::new(config()).unwrap();
        for (opaque, opcode, status, value) in answers {
            let answer = Frame::response(Opcode(opcode), Status(status)).with_opaque(Opaque(opaque));
            let _ = feed(&mut bootstrap, &encoded(&answer.with_value(&value)));
        }
    }
}

/// The flags that a DCP connection is opened with on a server with such features.
fn flags_sent(features: Option<Vec<Feature>>, dcp: DcpOpen) -> OpenFlags {
    let mut server = Login { features, ..Login::default() };
    let mut bootstrap = Bootstrap::new(BootstrapConfig { dcp: Some(dcp), ..config() }).unwrap();
    let mut opened = None;
    while !bootstrap.is_done() {
        for request in drain(&mut bootstrap) {
            if request.opcode() == Opcode::DCP_OPEN {
                opened = Some(Open::decode(&request.frame()).unwrap().flags);
            }
            feed(&mut bootstrap, &server.answer(&request)).unwrap();
        }
    }
    opened.expect("it is opened")
}

/// Servers before 6.6 refuse a DCP_OPEN with a flag that they do not know, and no feature is called
/// like it.
#[test]
fn user_xattrs_of_deletions_are_requested_where_the_server_has_them() {
    let flags = OpenFlags::INCLUDE_XATTRS | OpenFlags::INCLUDE_DELETED_USER_XATTRS;
    let older = Some(vec![Feature::XERROR, Feature::SELECT_BUCKET]);
    for (features, is_granted) in [(None, true), (older, false)] {
        let sent = flags_sent(features, DcpOpen::new("name", flags, 1024, 20));
        assert_eq!(sent.contains(OpenFlags::INCLUDE_DELETED_USER_XATTRS), is_granted);
    }
}

#[test]
fn op_10_deletions_are_skipped_where_the_server_can_and_required_if_asked_for() {
    let (flag, feature) = (
        OpenFlags::SKIP_DELETES_IN_INITIAL_BACKFILL,
        Feature::DCP_SKIP_DELETES_IN_INITIAL_BACKFILL,
    );
    let open = DcpOpen::new("name", flag, 1024, 20);
    let older = Some(BootstrapConfig::FEATURES.to_vec());
    let newer = Some([&BootstrapConfig::FEATURES[..], &[feature]].concat());
    assert!(flags_sent(newer.clone(), open.clone()).contains(flag));
    assert!(!flags_sent(older.clone(), open.clone()).contains(flag), "they would refuse it");
    let none = DcpOpen::new("name", OpenFlags::empty(), 1024, 20);
    assert!(!flags_sent(newer.clone(), none).contains(flag));
    let required = DcpOpen { required_features: vec![feature], ..open };
    assert!(flags_sent(newer, required.clone()).contains(flag));
    let mut server = Login { features: older, ..Login::default() };
    let strict = BootstrapConfig { dcp: Some(required), ..config() };
    assert_eq!(failure(&mut server, strict), BootstrapError::FeatureMissing(feature));
}
