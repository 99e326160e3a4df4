//! A transactional producer.

use std::ffi::CString;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::error::{Error, Kind};
use crate::library::{Client, Library};
use crate::records::Records;

/// How long to wait at a time until the queue has room, of which nothing tells: less than the broker
/// thread takes to empty it.
const TURN: Duration = Duration::from_millis(2);

/// Writes records in transactions.
pub struct Producer(Client);

impl Producer {
    /// A producer that uses the librdkafka at a path, with its options by their names there.
    ///
    /// # Errors
    ///
    /// The library cannot be loaded or is too old ([`Kind::Library`]), or an option is wrong
    /// ([`Kind::Config`]). The text has no value of an option whose name says that it is secret.
    pub fn new(library: &Path, config: &[(String, String)]) -> Result<Self, Error> {
        let options: Vec<_> = config
            .iter()
            .map(|(name, value)| Ok((as_c(name, name)?, as_c(name, value)?)))
            .collect::<Result<_, Error>>()?;
        let client = Client::new(Library::load(library)?, &options);
        Ok(Self(client.map_err(|error| without_secrets(error, config))?))
    }

    /// Fences producers with the same `transactional.id`, and ends their transactions.
    ///
    /// # Errors
    ///
    /// No broker did it in time, or they refuse to.
    pub fn init(&self, timeout: Duration) -> Result<(), Error> {
        until(timeout, |left| self.0.init_transactions(left))
    }

    /// Begins a transaction.
    ///
    /// # Errors
    ///
    /// Another producer has fenced this one.
    pub fn begin(&self) -> Result<(), Error> {
        self.0.begin_transaction()
    }

    /// Commits the transaction, once all its records were delivered.
    ///
    /// # Errors
    ///
    /// A record was not delivered, another producer has fenced this one, or it was not done in
    /// time; then it is not known whether it will be.
    pub fn commit(&self, timeout: Duration) -> Result<(), Error> {
        until(timeout, |left| self.0.commit_transaction(left))
    }

    /// Aborts the transaction.
    ///
    /// # Errors
    ///
    /// As for [`Self::commit`].
    pub fn abort(&self, timeout: Duration) -> Result<(), Error> {
        until(timeout, |left| self.0.abort_transaction(left))
    }

    /// Adds records to the transaction. The queue is bounded: it waits while that is full.
    ///
    /// # Errors
    ///
    /// A record is refused, or the queue stays full for so long.
    pub fn send(
        &self,
        topic: &str,
        partitions: u32,
        records: &Records<'_>,
        timeout: Duration,
    ) -> Result<(), Error> {
        let mut topic = self.0.topic(&as_c("topic", topic)?)?;
        let (mut text, mut ends) = (String::new(), Vec::new());
        // Else librdkafka reads the clock for each record.
        let mut now = unix_millis();
        for row in 0..records.len() {
            let record = records.get(row, partitions);
            records.headers(row, &mut text, &mut ends);
            let mut until = None;
            loop {
                let mut start = 0;
                let headers = ends.iter().filter_map(|(place, end)| {
                    let value = text.as_bytes().get(start..*end)?;
                    start = *end;
                    Some((records.header(*place)?, value))
                });
                match topic.produce(&record, now, headers) {
                    Ok(()) => break,
                    Err(error) if error.name != "_QUEUE_FULL" => return Err(error),
                    Err(error) => {
                        let until = *until.get_or_insert_with(|| Instant::now() + timeout);
                        if Instant::now() >= until {
                            return Err(Error { kind: Kind::Timeout, ..error });
                        }
                        self.0.poll(TURN);
                        now = unix_millis();
                    }
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer").finish_non_exhaustive()
    }
}

/// The time of records. 0 has librdkafka read the clock.
fn unix_millis() -> i64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(time.as_millis()).unwrap_or(0)
}

/// Calls again what may succeed later.
fn until(timeout: Duration, call: impl Fn(Duration) -> Result<(), Error>) -> Result<(), Error> {
    let end = Instant::now() + timeout;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match call(left) {
            Err(error) if error.is_retriable && Instant::now() + TURN < end => {
                std::thread::sleep(TURN);
            }
            done => return done,
        }
    }
}

fn as_c(name: &str, value: &str) -> Result<CString, Error> {
    let failed = |_| Error::own(Kind::Config, "_INVALID_ARG", format!("{name} has a NUL"));
    CString::new(value).map_err(failed)
}

/// librdkafka quotes a value that it does not take.
fn without_secrets(mut error: Error, config: &[(String, String)]) -> Error {
    for (name, value) in config {
        let is_secret = ["password", "secret", "key", "jaas", "oauthbearer"]
            .iter()
            .any(|word| name.contains(word));
        if is_secret && !value.is_empty() {
            error.text = error.text.replace(value, "***");
        }
    }
    error
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;

    use super::{Producer, without_secrets};
    use crate::error::{Error, Kind};

    #[test]
    fn what_is_no_librdkafka_is_a_typed_error() {
        let error = Producer::new(Path::new("/nowhere/librdkafka.so"), &[]).unwrap_err();
        assert_eq!(error.kind, Kind::Library);
        let libc = Path::new("libc.so.6");
        let error = Producer::new(libc, &[]).unwrap_err();
        assert_eq!(error.kind, Kind::Library);
        assert!(error.text.contains("rd_kafka"), "{error}");
        let nul = [("client.id".to_owned(), "a\0".to_owned())];
        assert_eq!(Producer::new(libc, &nul).unwrap_err().kind, Kind::Config);
    }

    #[test]
    fn a_secret_is_not_quoted() {
        let error = Error::own(Kind::Config, "_INVALID_ARG", "no value canary for x");
        let config = [("sasl.password".to_owned(), "canary".to_owned())];
        assert_eq!(without_secrets(error, &config).text, "no value *** for x");
    }
}
