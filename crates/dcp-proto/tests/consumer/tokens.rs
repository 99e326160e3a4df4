//! Tokens that expire: when a newer one is asked for, and what is held back without one.

use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use dcp_proto::Position;
use dcp_proto::consumer::{
    Connection, ConnectionConfig, ConnectionError, Event, StreamPosition, Token,
};
use dcp_test::harness::{Harness, Sent, VB, config};
use dcp_test::packet::packets;
use dcp_wire::message::Sasl;
use dcp_wire::sasl::BearerMessage;
use dcp_wire::{Frame, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};

/// The time of the wall when a connection begins.
const WALL: Duration = Duration::from_secs(1_800_000_000);

const HOUR: Duration = Duration::from_secs(3600);

fn secs(number: u64) -> Duration {
    Duration::from_secs(number)
}

/// A token that expires so long after [`WALL`].
fn token(left: Duration) -> Token {
    let claims = format!(r#"{{"exp":{}}}"#, (WALL + left).as_secs_f64());
    let claims = URL_SAFE_NO_PAD.encode(claims);
    Token::new(format!("e30.{claims}.c2ln")).unwrap()
}

/// A stream on a connection whose token is valid for so long.
struct Tokens {
    server: Harness,
    begun: Instant,
}

impl Tokens {
    fn with(token: &Token, config: ConnectionConfig) -> Self {
        let mut server = Harness::new(config.clone());
        let begun = server.now;
        let machine = Connection::new(config, begun);
        server.machine = machine.with_token(begun, WALL, token);
        server.open(StreamPosition::new(Position::EARLIEST));
        server.accept(&[(1, 0)]);
        Self { server, begun }
    }

    fn valid_for(left: Duration) -> Self {
        Self::with(&token(left), ConnectionConfig { noop_interval: None, ..config() })
    }

    /// It is so long after the connection began.
    fn at(&mut self, after: Duration) -> Result<(), ConnectionError> {
        self.server.now = self.begun + after;
        self.server.machine.handle_timeout(self.server.now)
    }

    fn wall(&self) -> Duration {
        WALL + (self.server.now - self.begun)
    }

    fn is_wanted(&mut self) -> bool {
        self.server.machine.poll_token_wanted()
    }

    fn give(&mut self, token: Option<&Token>) {
        let wall = self.wall();
        self.server.machine.renew_token(self.server.now, wall, token);
    }

    /// The token that is sent, and the opaque of its packet.
    fn offered(&mut self) -> Option<(String, Opaque)> {
        let mut bytes = Vec::new();
        if !self.server.machine.poll_transmit_token(&mut bytes) {
            return None;
        }
        let sent = packets(&bytes);
        let [packet] = &sent[..] else { panic!("{sent:?}") };
        let frame = packet.frame();
        let sasl = Sasl::decode(&frame).unwrap();
        assert_eq!(sasl.mechanism, b"OAUTHBEARER");
        let message = BearerMessage::decode(sasl.message).unwrap();
        assert_eq!(message.authzid, "");
        Some((message.token.to_owned(), frame.header.opaque))
    }

    fn answers(&mut self, opcode: Opcode, opaque: Opaque, status: Status) -> &mut Harness {
        let answer = Frame::response(opcode, status).with_opaque(opaque);
        answer.encode(&mut self.server.wire).unwrap();
        &mut self.server
    }

    /// Wants a token, is given one that the server accepts.
    fn renew(&mut self, left: Duration) {
        assert!(self.is_wanted());
        self.give(Some(&token(left)));
        let (sent, opaque) = self.offered().unwrap();
        assert_eq!(sent, token(left).as_str());
        self.answers(Opcode::SASL_AUTH, opaque, Status::SUCCESS).play();
    }

    fn noop(&mut self, opaque: u32) {
        let noop = Frame::request(Opcode::DCP_NOOP).with_opaque(Opaque(opaque));
        noop.encode(&mut self.server.wire).unwrap();
        self.server.play();
    }
}

fn noop_answer(opaque: u32) -> Sent {
    Sent::Response { opcode: Opcode::DCP_NOOP, opaque: Opaque(opaque), status: Status::SUCCESS }
}

#[test]
fn token_is_renewed_in_good_time_and_again() {
    // How long it is valid, and how long before its end a newer one is asked for.
    for (left, before) in [(HOUR, secs(60)), (secs(300), secs(30)), (secs(10), secs(2))] {
        let mut tokens = Tokens::valid_for(left);
        let ask_at = left - before;
        assert_eq!(tokens.server.machine.poll_timeout(), Some(tokens.begun + ask_at), "{left:?}");
        tokens.at(ask_at - Duration::from_millis(1)).unwrap();
        assert!(!tokens.is_wanted());
        tokens.at(ask_at).unwrap();
        tokens.renew(ask_at + left);
        assert!(!tokens.is_wanted() && tokens.offered().is_none(), "once");
        tokens.at(2 * ask_at).unwrap();
        assert!(tokens.is_wanted(), "the newer one expires too");
    }
}

#[test]
fn token_valid_for_seconds_is_renewed_after_half_of_them() {
    let mut tokens = Tokens::valid_for(secs(3));
    tokens.at(Duration::from_millis(1499)).unwrap();
    assert!(!tokens.is_wanted());
    tokens.at(Duration::from_millis(1500)).unwrap();
    tokens.renew(secs(6));
}

#[test]
fn tk_08_token_is_renewed_while_everything_else_goes_on() {
    let mut tokens = Tokens::valid_for(secs(100));
    tokens.at(secs(90)).unwrap();
    assert!(tokens.is_wanted());
    tokens.give(Some(&token(secs(200))));
    let (_, opaque) = tokens.offered().unwrap();
    tokens.noop(7);
    assert_eq!(tokens.server.sent(), [noop_answer(7)], "the server answers in order");
    tokens.server.marker(0, 2).mutation(1).play();
    tokens.answers(Opcode::SASL_AUTH, opaque, Status::SUCCESS).mutation(2).play();
    assert_eq!(tokens.server.seqnos(), [1, 2]);
    assert!(tokens.server.events().is_empty(), "no stream ended");
}

#[test]
fn tk_07_token_that_expired_holds_back_acknowledgements_and_answers_to_noops() {
    let config = ConnectionConfig { window: 1000, ..config() };
    let mut tokens = Tokens::with(&token(secs(10)), config);
    tokens.at(secs(8)).unwrap();
    assert!(tokens.is_wanted());
    // The server counts whole seconds: it may refuse from the ninth on.
    tokens.at(Duration::from_millis(8900)).unwrap();
    tokens.noop(7);
    tokens.server.marker(0, 9).mutation(1).play();
    let held = tokens.server.machine.take_held();
    tokens.server.machine.release(tokens.server.now, held);
    tokens.at(secs(12)).unwrap();
    tokens.server.machine.request_cluster_map();
    assert_eq!(tokens.server.sent(), [], "the server would close the connection");
    assert_eq!(tokens.server.seqnos(), [1], "it still sends");
    tokens.give(Some(&token(secs(60))));
    let (_, opaque) = tokens.offered().unwrap();
    assert_eq!(tokens.server.sent(), [], "the server may refuse the token");
    tokens.answers(Opcode::SASL_AUTH, opaque, Status::SUCCESS).play();
    let acknowledged = Sent::Ack(u32::try_from(held).unwrap());
    let map = Sent::Other(Opcode::GET_CLUSTER_CONFIG);
    assert_eq!(tokens.server.sent(), [noop_answer(7), acknowledged, map]);
}

#[test]
fn token_that_has_no_successor_ends_the_connection_half_a_minute_later() {
    let mut tokens = Tokens::valid_for(secs(20));
    tokens.at(secs(18)).unwrap();
    let mut asked = 0;
    let ended = (18_000..60_000).step_by(100).find_map(|millis| {
        let error = tokens.at(Duration::from_millis(millis)).err();
        if tokens.is_wanted() {
            asked += 1;
            // The same, one that is older, or none.
            let given = [Some(token(secs(20))), Some(token(secs(19))), None];
            tokens.give(given[asked % 3].as_ref());
            assert!(tokens.offered().is_none());
        }
        error.map(|error| (millis, error))
    });
    assert_eq!(ended, Some((48_900, ConnectionError::TokenExpired)));
    assert_eq!(asked, 31, "once a second");
    let from = std::mem::replace(&mut tokens.server, Harness::new(config())).machine.into_streams();
    assert_eq!(from.len(), 1, "it resumes on another connection");
}

#[test]
fn token_that_has_no_successor_is_the_reason_and_not_the_silence_after_an_unanswered_noop() {
    let config = ConnectionConfig { noop_interval: Some(secs(1)), ..config() };
    let mut tokens = Tokens::with(&token(secs(10)), config);
    for second in 1..=8 {
        tokens.at(secs(second)).unwrap();
        tokens.noop(7);
    }
    tokens.at(Duration::from_millis(8900)).unwrap();
    tokens.noop(8);
    tokens.at(secs(38)).unwrap();
    assert_eq!(tokens.at(secs(39)), Err(ConnectionError::TokenExpired));
}

#[test]
fn tk_09_token_that_the_server_refuses_ends_the_connection() {
    for status in [
        Status::AUTH_ERROR,
        Status::AUTH_CONTINUE,
        Status::AUTH_STALE,
        Status::EACCESS,
        Status::EINVAL,
        Status::KEY_ENOENT,
        Status::NOT_SUPPORTED,
        Status::UNKNOWN_COMMAND,
        Status(0x7777),
    ] {
        let mut tokens = Tokens::valid_for(secs(20));
        tokens.at(secs(18)).unwrap();
        assert!(tokens.is_wanted());
        tokens.give(Some(&token(secs(40))));
        let (_, opaque) = tokens.offered().unwrap();
        let ended = tokens.answers(Opcode::SASL_AUTH, opaque, status).try_play().unwrap_err();
        let is_refused =
            matches!(ended, ConnectionError::TokenRefused { status: s, .. } if s == status);
        assert!(is_refused, "{status}: {ended}");
    }
}

#[test]
fn token_that_cannot_be_checked_now_is_sent_again() {
    let mut tokens = Tokens::valid_for(secs(20));
    tokens.at(secs(18)).unwrap();
    assert!(tokens.is_wanted());
    tokens.give(Some(&token(secs(40))));
    let (_, opaque) = tokens.offered().unwrap();
    tokens.answers(Opcode::SASL_AUTH, opaque, Status::ETMPFAIL).play();
    tokens.server.machine.request_cluster_map();
    assert_eq!(tokens.server.sent(), [], "the attempt has ended the earlier login");
    assert!(!tokens.is_wanted());
    tokens.at(secs(19)).unwrap();
    tokens.renew(secs(40));
    assert_eq!(tokens.server.sent(), [Sent::Other(Opcode::GET_CLUSTER_CONFIG)]);
}

#[test]
fn tk_05_and_tk_06_auth_stale_asks_for_a_newer_token_and_repeats_what_was_refused() {
    let config = ConnectionConfig { window: 1000, noop_interval: None, ..config() };
    let mut tokens = Tokens::with(&token(HOUR), config);
    tokens.at(secs(60)).unwrap();
    // Everything that a server whose clock is ahead can refuse.
    let machine = &mut tokens.server.machine;
    machine.request_cluster_map();
    machine.request_manifest();
    machine.request_high_seqnos();
    machine.request_failover_logs(&[Vbid(3)]);
    machine.request_observed_seqnos(&[(Vbid(4), Vbuuid(5))]);
    machine.request_purge_seqnos();
    let from = StreamPosition::new(Position::EARLIEST);
    machine.open_stream(Vbid(2), Seqno::MAX, from).unwrap();
    let now = tokens.server.now;
    tokens.server.machine.close_stream(now, VB);
    tokens.server.marker(0, 9).mutation(1).play();
    tokens.server.machine.acknowledge_all();
    let refused = tokens.server.packets();
    let opcodes: Vec<_> = refused.iter().map(|packet| packet.opcode()).collect();
    assert_eq!(opcodes.len(), 9, "{opcodes:?}");
    for packet in &refused {
        let opaque = packet.frame().header.opaque;
        tokens.answers(packet.opcode(), opaque, Status::AUTH_STALE).play();
    }
    assert!(tokens.server.packets().is_empty(), "held back");
    tokens.renew(2 * HOUR);
    let again = tokens.server.packets();
    assert_eq!(again, refused, "acknowledgements too");
    let [map, ..] = &again[..] else { panic!("nothing") };
    let opaque = map.frame().header.opaque;
    let answer = Frame::response(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS);
    answer.with_opaque(opaque).with_value(b"{}").encode(&mut tokens.server.wire).unwrap();
    tokens.server.play();
    assert!(matches!(tokens.server.events()[..], [.., Event::ClusterMap(_)]));
}

#[test]
fn auth_stale_right_after_a_token_was_accepted_waits_before_it_asks() {
    // It says nothing of its time, and neither do those after it.
    let opaque_token = |text: &str| Token::new(text.to_owned()).unwrap();
    let mut tokens =
        Tokens::with(&opaque_token("first"), ConnectionConfig { noop_interval: None, ..config() });
    assert_eq!(tokens.server.machine.poll_timeout(), None, "it may be valid for ever");
    for (second, text) in ["second", "third"].into_iter().enumerate() {
        tokens.answers(Opcode::STAT, Opaque(9), Status::AUTH_STALE).play();
        assert!(!tokens.is_wanted());
        tokens.at(secs(second as u64 + 1)).unwrap();
        assert!(tokens.is_wanted());
        tokens.give(Some(&opaque_token(text)));
        let (_, opaque) = tokens.offered().unwrap();
        tokens.answers(Opcode::SASL_AUTH, opaque, Status::SUCCESS).play();
    }
    tokens.at(secs(100)).unwrap();
    tokens.answers(Opcode::STAT, Opaque(9), Status::AUTH_STALE).play();
    assert!(tokens.is_wanted(), "not long after");
    tokens.give(Some(&opaque_token("third")));
    assert!(tokens.offered().is_none(), "the one that is stale");
}

#[test]
fn auth_stale_without_a_token_ends_the_connection() {
    let mut server = Harness::streaming(config());
    let answer = Frame::response(Opcode::GET_CLUSTER_CONFIG, Status::AUTH_STALE);
    answer.encode(&mut server.wire).unwrap();
    assert!(matches!(server.try_play(), Err(ConnectionError::Invalidated { .. })));
}

#[test]
fn token_past_its_end_by_a_wrong_clock_is_the_servers_to_judge() {
    let expired = Token::new(format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(r#"{"exp":9}"#)));
    let mut tokens = Tokens::with(&expired.unwrap(), config());
    tokens.at(secs(30)).unwrap();
    tokens.server.machine.request_cluster_map();
    assert_eq!(tokens.server.sent(), [Sent::Other(Opcode::GET_CLUSTER_CONFIG)]);
    assert!(!tokens.is_wanted());
}

#[test]
fn token_login_stays_with_a_connection_that_is_reused() {
    let mut tokens = Tokens::valid_for(secs(100));
    let now = tokens.server.now;
    tokens.server.machine.close_stream(now, VB);
    tokens.server.packets();
    let opaque = tokens.server.opaque;
    tokens.answers(Opcode::DCP_CLOSE_STREAM, opaque, Status::SUCCESS).play();
    let config = tokens.server.machine.config().clone();
    let other = Connection::new(config.clone(), tokens.begun);
    let used = std::mem::replace(&mut tokens.server.machine, other);
    tokens.server.machine = used.reuse(config, tokens.server.now);
    tokens.at(secs(90)).unwrap();
    tokens.renew(secs(200));
}

#[test]
fn answer_to_a_token_that_was_not_sent_breaks_the_protocol() {
    let mut tokens = Tokens::valid_for(HOUR);
    tokens.answers(Opcode::SASL_AUTH, Opaque(1), Status::SUCCESS);
    tokens.server.misbehaves();
}
