//! A search of everything that is logged, at TRACE, for the password of scripted logins and for what
//! SCRAM makes of it. A hit ends the process: a test that leaks cannot pass.

use std::io::Write as _;
use std::sync::{LazyLock, Once};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use log::{LevelFilter, Log, Metadata, Record};

use crate::parse_hex;

/// The password that scripted logins expect.
pub const PASSWORD: &str = "secret-never-shown";
/// What SCRAM salts it with.
pub const SALT: &[u8] = b"0123456789abcdef";
/// How often SCRAM hashes it.
pub const ITERATIONS: u32 = 4096;

/// The salted password, the client key, the stored key and the server key, for [`PASSWORD`], [`SALT`] and
/// [`ITERATIONS`], computed by Python's `hashlib`. Of those of SCRAM-SHA512, the beginnings.
const SCRAM: [&str; 12] = [
    "e88310380eb0a14316e9b85b41869e910e4000c6",
    "7db2d20aa433c8f3f601e95edea5d0aad98c46e7",
    "6009192e194da2c2ff997e2c2f5b6c64efeda32e",
    "7a9d17785819f4eae13a9093f320579a7a00853d",
    "2c1ecab14c6d6c3030b01b59c93c5ab43f9c529fa8b148ecf56b0068f46972ce",
    "0a23449ca351f3a526014d709bb2eca650ad963d1b0e2ffcd1ac0588e5783a4a",
    "f1d82117aa6ac96b2bf2358180f502099d022a4cd41c9edd54581b735c3d009b",
    "aae08c072fa3ac9f228cac3c5cac0a980a20f12c368ddd1a797d3aab8d803d50",
    "3d872d72a36e83e159bf04e541a7e29aacca3d422b904601a857d6b3142bfec9",
    "95ff365b64f82e8ed8424c8a85deb3d8cf36dcaf9e491b78247ef748b27d513e",
    "cb01e6e33e8cb319788b7bf21a478e7bf5435425809a32853d21cc7948d2d112",
    "f8c1bc862a89ae4092fb3b9cb84d1f2c27e8e017b62ad08af3659c90f443dd10",
];

static FORMS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let keys = SCRAM.into_iter().filter_map(parse_hex);
    std::iter::once(PASSWORD.into()).chain(keys).flat_map(|secret| forms(&secret)).collect()
});

/// How bytes may be written, with whatever bytes before and after them.
fn forms(secret: &[u8]) -> Vec<String> {
    let joined = |separator: &str, form: &dyn Fn(&u8) -> String| {
        secret.iter().map(form).collect::<Vec<_>>().join(separator)
    };
    let mut forms = vec![
        secret.escape_ascii().to_string(),
        joined("", &|byte| format!("{byte:02x}")),
        joined("", &|byte| format!("{byte:02X}")),
        joined(" ", &|byte| format!("{byte:02x}")),
        joined(", ", &u8::to_string),
        joined(", ", &|byte| format!("{byte:02x}")),
    ];
    for before in 0..3 {
        let encoded = STANDARD.encode([vec![0; before], secret.to_vec()].concat());
        // The first and the last digits are those of the neighbours, too.
        let digits = (before * 8).div_ceil(6)..(before + secret.len()) * 8 / 6;
        forms.push(encoded[digits].to_owned());
    }
    forms
}

/// What of a text is, or is made of, the password.
fn shown(text: &str) -> Option<&'static str> {
    FORMS.iter().find(|form| text.contains(*form)).map(String::as_str)
}

struct Canary;

impl Log for Canary {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let text = record.args().to_string();
        if let Some(form) = shown(&text) {
            // What a test prints is captured, and of another thread is not.
            let (target, mut out) = (record.target(), std::io::stderr());
            let _ = writeln!(out, "a log record of {target} shows a password as {form}: {text}");
            std::process::abort();
        }
    }

    fn flush(&self) {}
}

/// Begins the search, for all tests of the process.
pub(crate) fn watch() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        if log::set_logger(&Canary).is_ok() {
            log::set_max_level(LevelFilter::Trace);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_is_found_however_it_is_written() {
        let sent = [b"\0user\0", PASSWORD.as_bytes(), b"\0"].concat();
        let (debug, hex) = (format!("{sent:?}"), format!("{sent:02x?}"));
        let basic = STANDARD.encode(format!("user:{PASSWORD}"));
        for text in [&*String::from_utf8_lossy(&sent), &debug, &hex, &basic] {
            assert!(shown(text).is_some(), "{text}");
        }
        assert_eq!(shown("user, password"), None);
    }

    #[test]
    fn scram_secrets_derived_from_a_password_are_found() {
        use dcp_wire::sasl::{Mechanism, ScramClient, ScramCredentials, ScramServer};
        for (mechanism, keys) in
            [Mechanism::ScramSha1, Mechanism::ScramSha256].into_iter().zip(SCRAM.chunks(4))
        {
            let [stored, server] = [keys[2], keys[3]].map(|key| parse_hex(key).unwrap().into());
            let stored = ScramCredentials::from_keys(mechanism, SALT, ITERATIONS, stored, server);
            let mut client = ScramClient::new(mechanism, "user", PASSWORD, "nonce").unwrap();
            let mut server = ScramServer::read(&client.first_message()).unwrap();
            let challenge = server.challenge(stored.unwrap(), "server").unwrap();
            let last = server.verify(&client.respond(&challenge).unwrap()).unwrap();
            client.verify(&last).unwrap();
        }
        for key in SCRAM.map(|key| parse_hex(key).unwrap()) {
            assert!(shown(&format!("{key:?}")).is_some());
        }
        assert_eq!(shown(&STANDARD.encode(SALT)), None);
    }
}
