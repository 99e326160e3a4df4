//! Both halves against the RFCs' examples and against recorded exchanges.

use super::*;

struct Exchange {
    mechanism: Mechanism,
    username: &'static str,
    password: &'static str,
    client_nonce: &'static str,
    server_nonce: &'static str,
    salt: &'static str,
    client_first: &'static str,
    challenge: &'static str,
    client_final: &'static str,
    server_final: &'static str,
}

const EXCHANGES: [Exchange; 4] = [
    // RFC 5802, section 5.
    Exchange {
        mechanism: Mechanism::ScramSha1,
        username: "user",
        password: "pencil",
        client_nonce: "fyko+d2lbbFgONRv9qkxdawL",
        server_nonce: "3rfcNHYJY1ZVvWVs7j",
        salt: "QSXCR+Q6sek8bf92",
        client_first: "n,,n=user,r=fyko+d2lbbFgONRv9qkxdawL",
        challenge: "r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
        client_final: "c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,\
                       p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
        server_final: "v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
    },
    // RFC 7677, section 3.
    Exchange {
        mechanism: Mechanism::ScramSha256,
        username: "user",
        password: "pencil",
        client_nonce: "rOprNGfwEbeRWgbNEkqO",
        server_nonce: "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0",
        salt: "W22ZaJ0SNY7soEsUEjb6gQ==",
        client_first: "n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
        challenge: "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
                    s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        client_final: "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
                       p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        server_final: "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    },
    // The official Python SDK against a server 8.0.2: both connections of the recorded scenario
    // `sdk-python-scram`.
    Exchange {
        mechanism: Mechanism::ScramSha512,
        username: "@admin",
        password: "password",
        client_nonce: "0x43 0xffffff9b 0x72 0xfffffff3 0xffffff96 0x4e 0x08 0x76",
        server_nonce: "91d2312e9ef35341",
        salt: "MDEyMzQ1Njc4OWFiY2RlZg==",
        client_first: "n,,n=@admin,r=0x43 0xffffff9b 0x72 0xfffffff3 0xffffff96 0x4e 0x08 0x76",
        challenge: "r=0x43 0xffffff9b 0x72 0xfffffff3 0xffffff96 0x4e 0x08 0x7691d2312e9ef35341,\
                    s=MDEyMzQ1Njc4OWFiY2RlZg==,i=4096",
        client_final: "c=biws,\
            r=0x43 0xffffff9b 0x72 0xfffffff3 0xffffff96 0x4e 0x08 0x7691d2312e9ef35341,\
            p=2IUEjawHI8L8uj4UTLOdXnX6+IGork9v9r6URBsLn2ozbdvhdh7d1F4lMqnFG/0NlPxmydeQRWL0WIOc\
            /QfcsQ==",
        server_final: "v=FyxappgkLL4kdkRyeIYM7kV1U9QaMuF2rHk+DQQcD+skVg9/92a0SyHNqhiMgM35QA1XTyIL\
                       L13rQrgBzszcMQ==",
    },
    Exchange {
        mechanism: Mechanism::ScramSha512,
        username: "@admin",
        password: "password",
        client_nonce: "0xfffffff1 0xffffff9d 0x3c 0xffffffff 0xffffffb4 0x3f 0x3c 0xffffffd4",
        server_nonce: "cd6234e0ea059249",
        salt: "MDEyMzQ1Njc4OWFiY2RlZg==",
        client_first: "n,,n=@admin,r=0xfffffff1 0xffffff9d 0x3c 0xffffffff 0xffffffb4 0x3f 0x3c \
                       0xffffffd4",
        challenge: "r=0xfffffff1 0xffffff9d 0x3c 0xffffffff 0xffffffb4 0x3f 0x3c \
                    0xffffffd4cd6234e0ea059249,s=MDEyMzQ1Njc4OWFiY2RlZg==,i=4096",
        client_final: "c=biws,r=0xfffffff1 0xffffff9d 0x3c 0xffffffff 0xffffffb4 0x3f 0x3c \
            0xffffffd4cd6234e0ea059249,\
            p=SZOSbOO3dBaYKq7MMZqK2teULLQ3VE7jgvMEadV7peZTpHJpxZEnBGaRsMjkXQXoLBiBnM\
            /cRIogBRhfEXAF9A==",
        server_final: "v=Z3M2oyTqNkkhETnmWO7lFjOhu+aOSBZz7AmvhxRk0m4CC7zf3/o0gxNpy5SADkrSyj62yOoY\
                       QWsahZs6bknzEg==",
    },
];

impl Exchange {
    fn client(&self, password: &str) -> ScramClient {
        ScramClient::new(self.mechanism, self.username, password, self.client_nonce).unwrap()
    }

    fn credentials(&self, password: &str) -> ScramCredentials {
        let salt = digest::decode_base64(self.salt, "salt").unwrap();
        ScramCredentials::derive(self.mechanism, password, &salt, 4096).unwrap()
    }

    /// A server that has sent its challenge.
    fn server(&self, password: &str) -> ScramServer {
        let mut server = ScramServer::read(self.client_first.as_bytes()).unwrap();
        assert_eq!(server.username(), self.username);
        let challenge = server.challenge(self.credentials(password), self.server_nonce).unwrap();
        assert_eq!(String::from_utf8(challenge).unwrap(), self.challenge);
        server
    }
}

#[test]
fn scram_client_writes_the_published_and_recorded_messages() {
    for exchange in &EXCHANGES {
        let mut client = exchange.client(exchange.password);
        assert_eq!(client.first_message(), exchange.client_first.as_bytes());
        let answer = client.respond(exchange.challenge.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(answer).unwrap(), exchange.client_final);
        client.verify(exchange.server_final.as_bytes()).unwrap();
    }
}

#[test]
fn scram_server_accepts_the_published_and_recorded_proofs() {
    for exchange in &EXCHANGES {
        let server = exchange.server(exchange.password);
        let last = server.verify(exchange.client_final.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(last).unwrap(), exchange.server_final);
    }
}

#[test]
fn scram_first_message_with_a_changed_header_is_noticed() {
    let exchange = &EXCHANGES[0];
    let changed = exchange.client_first.replacen('n', "y", 1);
    let mut server = ScramServer::read(changed.as_bytes()).unwrap();
    server.challenge(exchange.credentials(exchange.password), exchange.server_nonce).unwrap();
    let proof = exchange.client_final.as_bytes();
    assert_eq!(server.verify(proof), Err(SaslError::ChannelBinding));
}

#[test]
fn scram_server_refuses_a_wrong_password() {
    for exchange in &EXCHANGES {
        let server = exchange.server("another password");
        let verdict = server.verify(exchange.client_final.as_bytes());
        assert_eq!(verdict, Err(SaslError::ClientProof));
    }
}

#[test]
fn scram_client_refuses_a_server_that_does_not_know_the_password() {
    let [first, second, ..] = &EXCHANGES;
    let mut client = first.client(first.password);
    client.respond(first.challenge.as_bytes()).unwrap();
    // Right form and length, wrong key.
    let forged = b"v=rmF9pqV8S7suAoZWja4dJRkFsKU=";
    assert_eq!(client.verify(forged), Err(SaslError::ServerSignature));
    // The exchange is over: nothing can follow.
    assert_eq!(client.verify(first.server_final.as_bytes()), Err(SaslError::OutOfOrder));

    let mut client = second.client(second.password);
    client.respond(second.challenge.as_bytes()).unwrap();
    assert_eq!(client.verify(b"v="), Err(SaslError::ServerSignature));
}

#[test]
fn scram_challenge_that_does_not_continue_the_nonce_is_refused() {
    let exchange = &EXCHANGES[0];
    for challenge in [
        "r=somebodyElsesNonce,s=QSXCR+Q6sek8bf92,i=4096",
        // Nothing appended: the server adds no freshness.
        "r=fyko+d2lbbFgONRv9qkxdawL,s=QSXCR+Q6sek8bf92,i=4096",
    ] {
        let mut client = exchange.client(exchange.password);
        assert_eq!(client.respond(challenge.as_bytes()), Err(SaslError::Nonce));
        assert_eq!(client.respond(exchange.challenge.as_bytes()), Err(SaslError::OutOfOrder));
    }
}

#[test]
fn scram_iterations_over_the_limit_are_refused_before_any_work() {
    let exchange = &EXCHANGES[0];
    let challenge = "r=fyko+d2lbbFgONRv9qkxdawLx,s=QSXCR+Q6sek8bf92,i=4294967295";
    let mut client = exchange.client(exchange.password);
    assert_eq!(
        client.respond(challenge.as_bytes()),
        Err(SaslError::Iterations { iterations: u32::MAX, max: MAX_ITERATIONS })
    );
    let asked = |iterations: u32| {
        let challenge = format!("r=fyko+d2lbbFgONRv9qkxdawLx,s=QSXCR+Q6sek8bf92,i={iterations}");
        exchange.client(exchange.password).respond(challenge.as_bytes()).map(drop)
    };
    let iterations = MAX_ITERATIONS + 1;
    let too_many = SaslError::Iterations { iterations, max: MAX_ITERATIONS };
    assert_eq!((asked(MAX_ITERATIONS), asked(iterations)), (Ok(()), Err(too_many)));
    let mut client = exchange.client(exchange.password).with_max_iterations(4095);
    assert_eq!(
        client.respond(exchange.challenge.as_bytes()),
        Err(SaslError::Iterations { iterations: 4096, max: 4095 })
    );
}

#[test]
fn scram_challenge_that_would_give_the_password_away_is_not_answered() {
    let exchange = &EXCHANGES[0];
    let respond = |salt: &str, iterations: u32| {
        let challenge = format!("r=fyko+d2lbbFgONRv9qkxdawLx,s={salt},i={iterations}");
        exchange.client(exchange.password).respond(challenge.as_bytes()).map(drop)
    };
    for iterations in [0, 1, 999] {
        let too_few = Err(SaslError::TooFewIterations { iterations });
        assert_eq!(respond("QSXCR+Q6sek8bf92", iterations), too_few);
    }
    for (salt, len) in [("", 0), ("QQ==", 1), ("QUFBQUFBQQ==", 7)] {
        assert_eq!(respond(salt, 4096), Err(SaslError::ShortSalt { len }));
    }
    assert_eq!(respond("QUFBQUFBQUE=", 1000), Ok(()), "8 bytes, 1,000 rounds");
}

#[test]
fn scram_server_keeps_no_credentials_that_clients_would_refuse() {
    let derive = |salt: &[u8], iterations: u32| {
        ScramCredentials::derive(Mechanism::ScramSha256, "password", salt, iterations).is_ok()
    };
    assert!(derive(&[7; MIN_SALT_LEN], MIN_ITERATIONS));
    assert!(!derive(&[7; MIN_SALT_LEN - 1], MIN_ITERATIONS));
    assert!(!derive(&[7; MIN_SALT_LEN], MIN_ITERATIONS - 1));
    assert!(!derive(&[7; MIN_SALT_LEN], MAX_ITERATIONS + 1));
}

#[test]
fn scram_challenges_that_are_malformed_are_errors() {
    let exchange = &EXCHANGES[0];
    for challenge in [
        "",
        "r=",
        "s=QSXCR+Q6sek8bf92,i=4096",
        "m=ext,r=fyko+d2lbbFgONRv9qkxdawLx,s=QSXCR+Q6sek8bf92,i=4096",
        "r=fyko+d2lbbFgONRv9qkxdawLx,s=not base64,i=4096",
        "r=fyko+d2lbbFgONRv9qkxdawLx,s=QSXCR+Q6sek8bf92,i=-1",
        "r=fyko+d2lbbFgONRv9qkxdawLx,s=QSXCR+Q6sek8bf92",
    ] {
        let mut client = exchange.client(exchange.password);
        let verdict = client.respond(challenge.as_bytes());
        assert!(matches!(verdict, Err(SaslError::Malformed(_))), "{challenge}: {verdict:?}");
    }
    let mut client = exchange.client(exchange.password);
    assert!(matches!(client.respond(&[0xff, 0xfe]), Err(SaslError::Malformed(_))));
}

#[test]
fn scram_error_named_by_the_server_is_distinguished() {
    let exchange = &EXCHANGES[0];
    for (text, error) in [
        ("e=invalid-proof", ServerError::InvalidProof),
        ("e=unknown-user", ServerError::UnknownUser),
        ("e=channel-bindings-dont-match", ServerError::ChannelBinding),
        ("e=made-up,x=y", ServerError::Other),
    ] {
        let mut client = exchange.client(exchange.password);
        client.respond(exchange.challenge.as_bytes()).unwrap();
        assert_eq!(client.verify(text.as_bytes()), Err(SaslError::Server(error)));
    }
}

#[test]
fn scram_server_refuses_malformed_or_foreign_answers() {
    let exchange = &EXCHANGES[1];
    let proof = "p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";
    let nonce = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0";
    for (answer, error) in [
        (format!("c=biws,{nonce}"), SaslError::Malformed("client's final message")),
        (format!("c=cD10bHM=,{nonce},{proof}"), SaslError::ChannelBinding),
        (format!("c=biws,r=other,{proof}"), SaslError::Nonce),
        (format!("c=biws,{nonce},p=AAAA"), SaslError::ClientProof),
        (format!("c=biws,{nonce},p="), SaslError::ClientProof),
        (format!("c=biws,{nonce},p=***"), SaslError::Malformed("client's final message")),
        // An extension that was signed over differently.
        (format!("c=biws,{nonce},x=1,{proof}"), SaslError::ClientProof),
    ] {
        let server = exchange.server(exchange.password);
        assert_eq!(server.verify(answer.as_bytes()), Err(error), "{answer}");
    }
    for first in
        ["p=tls-unique,,n=user,r=abc", "n,a=root,n=user,r=abc", "n,,r=abc", "n,,n=,r=a", ""]
    {
        assert!(ScramServer::read(first.as_bytes()).is_err(), "{first}");
    }
    let bound = ScramServer::read(b"p=tls-exporter,,n=user,r=abc").unwrap_err();
    assert_eq!(bound, SaslError::ChannelBinding);
    let neither = ScramServer::read(b"q,,n=user,r=abc").unwrap_err();
    assert!(matches!(neither, SaslError::Malformed(_)), "{neither}");
    let unchallenged = ScramServer::read(exchange.client_first.as_bytes()).unwrap();
    assert_eq!(unchallenged.verify(exchange.client_final.as_bytes()), Err(SaslError::OutOfOrder));
}

#[test]
fn scram_user_names_may_have_commas_and_equals_signs() {
    let nonce = "fyko+d2lbbFgONRv9qkxdawL";
    let client = ScramClient::new(Mechanism::ScramSha1, "a=b,c=2C", "x", nonce).unwrap();
    let message = client.first_message();
    assert_eq!(message, b"n,,n=a=3Db=2Cc=3D2C,r=fyko+d2lbbFgONRv9qkxdawL");
    assert_eq!(ScramServer::read(&message).unwrap().username(), "a=b,c=2C");
    assert!(ScramServer::read(b"n,,n=a=b,r=abc").is_err());
    assert!(ScramServer::read(b"n,,n=a=,r=abc").is_err());
}

#[test]
fn passwords_are_prepared_so_that_spellings_of_one_text_agree() {
    // RFC 4013: the soft hyphen disappears, the roman numeral nine becomes two letters.
    let exchange = &EXCHANGES[0];
    for (typed, stored) in [("pen\u{ad}cil", "pencil"), ("\u{2168}", "IX")] {
        let mut client = exchange.client(typed);
        let answer = client.respond(exchange.challenge.as_bytes()).unwrap();
        assert!(exchange.server(stored).verify(&answer).is_ok());
    }
    let refused = ScramClient::new(Mechanism::ScramSha1, "user", "bell\u{7}", "abc");
    assert_eq!(refused.unwrap_err(), SaslError::Prohibited("password"));
}

#[test]
fn scram_nonce_that_would_break_the_message_is_refused() {
    for nonce in ["", "a,b", "caf\u{e9}", "a\n"] {
        let refused = ScramClient::new(Mechanism::ScramSha512, "user", "x", nonce);
        assert_eq!(refused.unwrap_err(), SaslError::Malformed("nonce"), "{nonce:?}");
    }
}

#[test]
fn sasl_mechanism_is_the_first_allowed_one_that_is_offered() {
    let all = b"PLAIN SCRAM-SHA1 SCRAM-SHA256 SCRAM-SHA512 OAUTHBEARER";
    let (scram, plain) = (&Mechanism::SCRAM, Mechanism::Plain);
    assert_eq!(select_mechanism(all, scram), Ok(Mechanism::ScramSha512));
    assert_eq!(select_mechanism(b"SCRAM-SHA1 PLAIN", scram), Ok(Mechanism::ScramSha1));
    assert_eq!(select_mechanism(all, &[plain, Mechanism::ScramSha512]), Ok(plain));
    assert_eq!(select_mechanism(b"PLAIN", scram), Err(SaslError::NoMechanism));
    // A prefix of a name is another name.
    assert_eq!(select_mechanism(b"SCRAM-SHA1024", scram), Err(SaslError::NoMechanism));
    assert_eq!(select_mechanism(b"", &Mechanism::ALL), Err(SaslError::NoMechanism));
    assert_eq!(select_mechanism(all, &[]), Err(SaslError::NoMechanism));
}

#[test]
fn sasl_plain_messages_round_trip_and_nul_bytes_are_refused() {
    let message = encode_plain("u", "p").unwrap();
    assert_eq!(message.as_slice(), b"\0u\0p");
    let decoded = PlainMessage::decode(&message).unwrap();
    assert!(decoded.matches("u", "p"));
    assert!(!decoded.matches("u", "q"));
    assert!(!decoded.matches("v", "p"));
    assert!(!decoded.matches("u", "pp"));
    assert_eq!(encode_plain("a\0b", "p").unwrap_err(), SaslError::Prohibited("user name"));
    assert_eq!(encode_plain("a", "p\0").unwrap_err(), SaslError::Prohibited("password"));
    for malformed in [&b""[..], b"u", b"\0u", b"\0\0p", b"\0u\0p\0", b"\0\xff\0p"] {
        assert!(PlainMessage::decode(malformed).is_err(), "{malformed:?}");
    }
    assert!(!PlainMessage::decode(b"root\0u\0p").unwrap().matches("u", "p"));
}

#[test]
fn sasl_debug_output_shows_no_secret() {
    let exchange = &EXCHANGES[0];
    let mut client = exchange.client("pencil");
    let before = format!("{client:?}");
    client.respond(exchange.challenge.as_bytes()).unwrap();
    let plain = PlainMessage { authzid: "", username: "user", password: "pencil" };
    let shown = format!(
        "{before}{client:?}{:?}{:?}{plain:?}",
        exchange.credentials("pencil"),
        exchange.server("pencil")
    );
    assert!(!shown.contains("pencil"), "{shown}");
    assert!(!shown.contains("QSXCR") && !shown.contains("fyko"), "{shown}");
}

#[test]
fn scram_credentials_with_keys_of_the_wrong_length_are_refused() {
    let (mechanism, salt) = (Mechanism::ScramSha256, b"salt salt");
    let key = |len| Zeroizing::new(vec![7; len]);
    let from =
        |len| ScramCredentials::from_keys(mechanism, salt, MIN_ITERATIONS, key(len), key(32));
    assert!(from(32).is_ok());
    assert!(from(20).is_err());
    assert!(ScramCredentials::derive(Mechanism::Plain, "x", salt, MIN_ITERATIONS).is_err());
}
