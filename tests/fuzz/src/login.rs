//! SASL, both ends.

use std::cell::RefCell;

use dcp_wire::sasl::{
    BearerMessage, MIN_ITERATIONS, Mechanism, PlainMessage, ScramClient, ScramCredentials,
    ScramServer, encode_bearer, encode_plain, select_mechanism,
};

use crate::bytes_in::BytesIn;

const NONCE: &str = "abcdefghijklmnopqrstuvwx";
const PASSWORD: &str = "secret";

/// A fuzzer carries one login of so many through: the thousand rounds of each would take most of its
/// time. In the others the client refuses any number of rounds, after it has read the challenge.
const CARRIED_THROUGH: u32 = 32;

/// Whatever a peer says: nobody who does not know the password gets in, at either end, and
/// everybody who does.
pub fn sasl(data: &[u8]) {
    let mut bytes = BytesIn::new(data);
    let how = bytes.u8();
    let mechanism = Mechanism::SCRAM[usize::from(how >> 4) % 3];
    let is_through = !cfg!(fuzzing) || crc32fast::hash(data).is_multiple_of(CARRIED_THROUGH);
    let rounds = MIN_ITERATIONS - u32::from(!is_through);
    match how & 15 {
        0 => plain(bytes.rest()),
        1 => offered(bytes.rest()),
        2 => bearer(bytes.rest()),
        3..=6 => server(mechanism, bytes),
        7..=11 => client(mechanism, rounds, bytes),
        _ => both(mechanism, rounds, bytes),
    }
}

fn plain(message: &[u8]) {
    let Ok(read) = PlainMessage::decode(message) else { return };
    let himself = read.authzid.is_empty() || read.authzid == read.username;
    assert_eq!(read.matches(read.username, read.password), himself);
    assert!(!read.matches(read.username, &format!("{}.", read.password)));
    let again = encode_plain(read.username, read.password).expect("no NUL bytes");
    assert!(message.ends_with(&again));
}

fn bearer(message: &[u8]) {
    let Ok(read) = BearerMessage::decode(message) else { return };
    let again = encode_bearer(read.token).expect("a token");
    let again = BearerMessage::decode(&again).expect("a message");
    assert_eq!((again.authzid.as_ref(), again.token), ("", read.token));
}

fn offered(names: &[u8]) {
    if let Ok(mechanism) = select_mechanism(names, &Mechanism::SCRAM) {
        assert!(!mechanism.reveals_password());
        let name = mechanism.name().as_bytes();
        assert!(names.windows(name.len()).any(|offered| offered == name));
    }
}

/// A server's stored credentials, derived once: that takes a thousand rounds.
fn stored(mechanism: Mechanism) -> ScramCredentials {
    thread_local! {
        static STORED: RefCell<Vec<ScramCredentials>> = const { RefCell::new(Vec::new()) };
    }
    STORED.with_borrow_mut(|stored| {
        let known = stored.iter().find(|known| known.mechanism() == mechanism).cloned();
        known.unwrap_or_else(|| {
            let made = ScramCredentials::derive(mechanism, PASSWORD, b"salty-salt", MIN_ITERATIONS);
            stored.push(made.expect("an ordinary password"));
            stored.last().expect("it was just put there").clone()
        })
    })
}

/// A client that does not know the password.
fn server(mechanism: Mechanism, mut bytes: BytesIn<'_>) {
    let Ok(mut server) = ScramServer::read(bytes.line()) else { return };
    assert!(!server.username().is_empty());
    let challenge = server.challenge(stored(mechanism), NONCE).expect("a good nonce");
    assert!(server.challenge(stored(mechanism), NONCE).is_err(), "a second challenge");
    // The nonce it cannot guess is told; the proof is its own.
    let nonce = challenge[2..].split(|&byte| byte == b',').next().unwrap_or_default();
    let mut last = bytes.line().to_vec();
    if let Some(at) = last.iter().position(|&byte| byte == b'%') {
        last.splice(at..=at, nonce.iter().copied());
    }
    assert!(server.verify(&last).is_err(), "it does not know the password");
}

/// A server that does not know the password, and a client that does at most so many rounds.
fn client(mechanism: Mechanism, rounds: u32, mut bytes: BytesIn<'_>) {
    let client = ScramClient::new(mechanism, "user", PASSWORD, NONCE).expect("ordinary names");
    let mut client = client.with_max_iterations(rounds);
    let mut challenge = bytes.line().to_vec();
    if let Some(at) = challenge.iter().position(|&byte| byte == b'%') {
        challenge.splice(at..=at, NONCE.bytes());
    }
    let answered = client.respond(&challenge);
    if answered.is_ok() {
        let text = String::from_utf8_lossy(&challenge);
        let asked = text.split(',').find_map(|attribute| attribute.strip_prefix("i="));
        assert_eq!(asked.map(str::parse), Some(Ok(MIN_ITERATIONS)), "fewer or more rounds");
        assert_eq!(rounds, MIN_ITERATIONS, "more rounds than it may do");
        assert!(client.respond(&challenge).is_err(), "a second challenge");
    }
    assert!(client.verify(bytes.line()).is_err(), "it does not know the password");
}

/// Both, of which each tells the truth unless a byte is changed on the way. The client does at most
/// so many rounds.
fn both(mechanism: Mechanism, rounds: u32, mut bytes: BytesIn<'_>) {
    let (message, at, other) = (bytes.u8(), bytes.u8(), bytes.u8());
    let damage = |number: u8, mut text: Vec<u8>| {
        let len = text.len();
        if let Some(byte) = text.get_mut(usize::from(at) % len.max(1)).filter(|_| message == number)
        {
            *byte ^= other;
        }
        text
    };
    let is_damaged = message < 4 && other != 0;
    let Ok(username) = std::str::from_utf8(bytes.rest()) else { return };
    let Ok(client) = ScramClient::new(mechanism, username, PASSWORD, NONCE) else { return };
    let mut client = client.with_max_iterations(rounds);
    let outcome = || {
        let mut server = ScramServer::read(&damage(0, client.first_message())).ok()?;
        let challenge = server.challenge(stored(mechanism), NONCE).ok()?;
        let proof = client.respond(&damage(1, challenge)).ok()?;
        let last = server.verify(&damage(2, proof)).ok()?;
        client.verify(&damage(3, last)).ok()
    };
    let is_in = { outcome }();
    let is_refused = is_damaged || rounds < MIN_ITERATIONS;
    assert!(is_in.is_some() || is_refused, "both know the password");
    assert!(is_in.is_none() || !is_refused, "a message was changed on the way");
}
