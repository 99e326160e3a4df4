//! Credentials and tokens, and their sources.

use std::error::Error as StdError;
use std::fmt::{self, Debug};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_proto::consumer::Token;
use tokio::sync::{Semaphore, oneshot};
use zeroize::Zeroizing;

use crate::{Dial, Error, ErrorKind};

/// Longest file of a password or a token that is read.
const MAX_SECRET_FILE: u64 = 64 * 1024;

/// Most concurrent threads of a client for reading files and calling providers: if calls never
/// return, each attempt must not start another thread.
const MAX_THREADS: usize = 4;

/// A user name and password. The password is erased when dropped and never shown.
#[derive(Clone)]
pub struct Credentials {
    username: String,
    password: Zeroizing<String>,
}

impl Credentials {
    /// Credentials of a user.
    #[must_use]
    pub fn new(username: impl Into<String>, password: impl Into<String>) -> Self {
        Self { username: username.into(), password: Zeroizing::new(password.into()) }
    }

    /// User name.
    #[must_use]
    pub fn username(&self) -> &str {
        &self.username
    }

    pub(crate) const fn password(&self) -> &Zeroizing<String> {
        &self.password
    }
}

impl Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("username", &self.username).finish_non_exhaustive()
    }
}

/// Why there are no credentials. Its text is shown, so it must not contain a secret.
pub type CredentialsError = Box<dyn StdError + Send + Sync + 'static>;

/// Provides credentials for every new connection, so that they may change while streams run.
///
/// It is called on a separate thread and may block, for example for a request to a vault; it may be
/// called from several threads at once. A connection waits at most
/// [`connect_timeout`](crate::ConnectOptions::connect_timeout). With a [`Dial::seed`], it is called
/// in place and must not block.
pub trait ProvideCredentials: Send + Sync {
    /// The credentials for one connection.
    ///
    /// # Errors
    /// [`CredentialsError`]: the connection fails, and is retried as if the server had refused it.
    fn credentials(&self) -> Result<Credentials, CredentialsError>;
}

/// Provides tokens: one for every new connection, and a newer one for each before it expires.
///
/// It is called as [`ProvideCredentials`] is: on a separate thread, where it may block.
pub trait ProvideToken: Send + Sync {
    /// A token, the newest there is.
    ///
    /// # Errors
    /// [`CredentialsError`]: a new connection fails, and is retried as if the server had refused it;
    /// one that is up asks again a second later.
    fn token(&self) -> Result<String, CredentialsError>;
}

/// Source of a connection's credentials.
#[derive(Clone)]
#[non_exhaustive]
pub enum CredentialsSource {
    /// Always these.
    Fixed(Credentials),
    /// A user whose password is in a file, which is read for every connection. A final newline is
    /// removed.
    PasswordFile {
        /// User name.
        username: String,
        /// The file.
        path: PathBuf,
    },
    /// What this gives.
    Provider(Arc<dyn ProvideCredentials>),
    /// A token, until it expires. As all tokens, it is sent over TLS only, and names the user.
    Token(Token),
    /// A token in a file, which is read for every connection, and again before the token expires.
    /// White space around it is removed.
    TokenFile(PathBuf),
    /// The tokens that this gives.
    TokenProvider(Arc<dyn ProvideToken>),
}

/// What a connection authenticates with.
#[derive(Clone, Debug)]
pub(crate) enum Secret {
    Password(Credentials),
    Token(Token),
}

impl CredentialsSource {
    /// User name, if it is known in advance.
    pub(crate) fn username(&self) -> Option<&str> {
        match self {
            Self::Fixed(credentials) => Some(credentials.username()),
            Self::PasswordFile { username, .. } => Some(username),
            Self::Provider(_) | Self::Token(_) | Self::TokenFile(_) | Self::TokenProvider(_) => {
                None
            }
        }
    }

    /// The option that gives a token; `None` if it is a password.
    pub(crate) const fn token_option(&self) -> Option<&'static str> {
        match self {
            Self::Token(_) | Self::TokenProvider(_) => Some("token"),
            Self::TokenFile(_) => Some("token_file"),
            Self::Fixed(_) | Self::PasswordFile { .. } | Self::Provider(_) => None,
        }
    }
}

impl From<Credentials> for CredentialsSource {
    fn from(credentials: Credentials) -> Self {
        Self::Fixed(credentials)
    }
}

impl Debug for CredentialsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(credentials) => credentials.fmt(f),
            Self::PasswordFile { username, path } => f
                .debug_struct("PasswordFile")
                .field("username", username)
                .field("path", path)
                .finish(),
            Self::Provider(_) => f.write_str("Provider(..)"),
            Self::Token(token) => token.fmt(f),
            Self::TokenFile(path) => f.debug_tuple("TokenFile").field(path).finish(),
            Self::TokenProvider(_) => f.write_str("TokenProvider(..)"),
        }
    }
}

/// Runs blocking calls, each on its own thread and few at a time; or without threads, if runs must
/// be reproducible.
#[derive(Clone, Debug)]
pub(crate) struct Aside {
    threads: Arc<Semaphore>,
    /// Whether calls are made in place, not on another thread.
    in_place: bool,
}

impl Aside {
    pub(crate) fn new(dialer: Option<&dyn Dial>) -> Self {
        // A simulated clock would advance while waiting for a thread.
        let in_place = dialer.and_then(Dial::seed).is_some();
        Self { threads: Arc::new(Semaphore::new(MAX_THREADS)), in_place }
    }

    /// Runs `call` on a new thread. Not one of the runtime's, which waits for its threads at
    /// shutdown.
    ///
    /// # Errors
    /// [`ErrorKind::Authentication`] if no thread is available, or the call panics.
    async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        if self.in_place {
            return Ok(call());
        }
        let failed = |message| Error::new(ErrorKind::Authentication, message);
        let permit = Arc::clone(&self.threads).acquire_owned().await.map_err(|closed| {
            failed("no thread is free to call the credentials function").with_source(closed)
        })?;
        let (sender, receiver) = oneshot::channel();
        let run = move || {
            let result = call();
            drop(permit);
            // The connection attempt may have been cancelled.
            let _ = sender.send(result);
        };
        std::thread::Builder::new().name("dcp_rs-credentials".to_owned()).spawn(run).map_err(
            |error| {
                failed("no thread could be started to call the credentials function")
                    .with_source(error)
            },
        )?;
        receiver.await.map_err(|_| failed("the credentials function panicked"))
    }

    /// What one connection authenticates with, or with what it renews a token.
    ///
    /// # Errors
    /// [`ErrorKind::Authentication`] if there is nothing.
    pub(crate) async fn credentials(&self, source: &CredentialsSource) -> Result<Secret, Error> {
        let failed = |message: String| Error::new(ErrorKind::Authentication, message);
        match source {
            CredentialsSource::Fixed(credentials) => Ok(Secret::Password(credentials.clone())),
            CredentialsSource::PasswordFile { username, path } => {
                let password = self.read_secret("password", path).await?;
                Ok(Secret::Password(Credentials { username: username.clone(), password }))
            }
            CredentialsSource::Provider(provider) => {
                let provider = Arc::clone(provider);
                let given = self.run(move || provider.credentials()).await?;
                given.map(Secret::Password).map_err(|error| {
                    failed("the credentials function failed".to_owned()).with_source(error)
                })
            }
            CredentialsSource::Token(token) => Ok(Secret::Token(token.clone())),
            CredentialsSource::TokenFile(path) => {
                let text = self.read_secret("token", path).await?;
                let token = Token::new(Zeroizing::new(text.trim().to_owned()));
                token.map(Secret::Token).map_err(|error| {
                    failed(format!("the token in {} cannot be used", path.display()))
                        .with_source(error)
                })
            }
            CredentialsSource::TokenProvider(provider) => {
                let provider = Arc::clone(provider);
                let text = self.run(move || provider.token()).await?.map_err(|error| {
                    failed("the token function failed".to_owned()).with_source(error)
                })?;
                Token::new(text).map(Secret::Token).map_err(|error| {
                    failed("what the token function returned cannot be used".to_owned())
                        .with_source(error)
                })
            }
        }
    }

    async fn read_secret(&self, what: &str, path: &Path) -> Result<Zeroizing<String>, Error> {
        let file = path.to_owned();
        self.run(move || read_secret(&file)).await?.map_err(|error| {
            let message = format!("the {what} could not be read from {}", path.display());
            Error::new(ErrorKind::Authentication, message).with_source(error)
        })
    }

    /// Runs `read`, which reads files, on a separate thread.
    ///
    /// # Errors
    /// Those of `read`.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.run(read).await?
    }
}

fn read_secret(path: &Path) -> io::Result<Zeroizing<String>> {
    let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut bytes = Zeroizing::new(Vec::with_capacity(1024));
    File::open(path)?.take(MAX_SECRET_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_SECRET_FILE {
        return Err(invalid("it is longer than 64 KiB"));
    }
    let text = std::str::from_utf8(&bytes).map_err(|_| invalid("it is not UTF-8"))?;
    let line = text.strip_suffix('\n').unwrap_or(text);
    Ok(Zeroizing::new(line.strip_suffix('\r').unwrap_or(line).to_owned()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    async fn ask(source: &CredentialsSource) -> Result<Credentials, Error> {
        match Aside::new(None).credentials(source).await? {
            Secret::Password(credentials) => Ok(credentials),
            Secret::Token(token) => panic!("{token:?}"),
        }
    }

    async fn token(source: &CredentialsSource) -> Result<String, Error> {
        match Aside::new(None).credentials(source).await? {
            Secret::Token(token) => Ok(token.as_str().to_owned()),
            Secret::Password(credentials) => panic!("{credentials:?}"),
        }
    }

    #[tokio::test]
    async fn token_file_is_read_each_time_without_white_space() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let source = CredentialsSource::TokenFile(path.clone());
        for (text, given) in [("one\n", "one"), ("  two\r\n\r\n", "two"), ("a.b.c", "a.b.c")] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(token(&source).await.unwrap(), given);
        }
        for (text, says) in [("", "it is empty"), ("secret word", "it holds a character")] {
            std::fs::write(&path, text).unwrap();
            let error = token(&source).await.unwrap_err();
            let text = format!("{} {error:?}", crate::Chain(&error));
            assert_eq!(error.kind(), ErrorKind::Authentication);
            assert!(text.contains(says) && text.contains("token"), "{text}");
            assert!(!text.contains("secret"), "{text}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(token(&source).await.unwrap_err().to_string().contains("the token could not"));
    }

    struct Tokens(&'static str);

    impl ProvideToken for Tokens {
        fn token(&self) -> Result<String, CredentialsError> {
            if self.0.is_empty() { Err("the issuer is down".into()) } else { Ok(self.0.to_owned()) }
        }
    }

    #[tokio::test]
    async fn token_function_that_fails_or_returns_no_token_is_an_error() {
        let from = |text| CredentialsSource::TokenProvider(Arc::new(Tokens(text)));
        assert_eq!(token(&from("one")).await.unwrap(), "one");
        for (text, says) in [("", "the issuer is down"), ("secret word", "it holds a character")] {
            let error = token(&from(text)).await.unwrap_err();
            let text = crate::Chain(&error).to_string();
            assert_eq!(error.kind(), ErrorKind::Authentication);
            assert!(text.contains(says) && !text.contains("secret"), "{text}");
        }
    }

    #[tokio::test]
    async fn password_file_is_read_each_time_without_its_final_newline() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        let source = CredentialsSource::PasswordFile { username: "u".into(), path: path.clone() };
        for (text, password) in [("one\n", "one"), ("two\r\n", "two"), ("a\nb", "a\nb"), ("", "")] {
            std::fs::write(&path, text).unwrap();
            let read = ask(&source).await.unwrap();
            assert_eq!((read.username(), read.password().as_str()), ("u", password));
        }
        std::fs::write(&path, b"secret\xff").unwrap();
        let error = ask(&source).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Authentication);
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
        std::fs::write(&path, vec![b'x'; 64 * 1024 + 1]).unwrap();
        assert!(ask(&source).await.is_err());
        std::fs::remove_file(&path).unwrap();
        let error = ask(&source).await.unwrap_err();
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }

    struct Hangs;

    impl ProvideCredentials for Hangs {
        fn credentials(&self) -> Result<Credentials, CredentialsError> {
            loop {
                std::thread::park();
            }
        }
    }

    #[tokio::test]
    async fn credentials_provider_that_never_returns_blocks_few_threads() {
        let aside = Aside::new(None);
        let source = CredentialsSource::Provider(Arc::new(Hangs));
        for _ in 0..20 {
            let asked = timeout(Duration::from_millis(5), aside.credentials(&source)).await;
            assert!(asked.is_err());
        }
        assert_eq!(aside.threads.available_permits(), 0);
        assert_eq!(Arc::strong_count(&aside.threads), 1 + MAX_THREADS);
    }

    /// Gives the thread it is called on as the user.
    struct TellsThread;

    impl ProvideCredentials for TellsThread {
        fn credentials(&self) -> Result<Credentials, CredentialsError> {
            Ok(Credentials::new(format!("{:?}", std::thread::current().id()), "password"))
        }
    }

    #[derive(Debug)]
    struct Dialer(Option<u64>);

    impl Dial for Dialer {
        fn dial(&self, _: &dcp_proto::topology::Address) -> crate::Dialing {
            unreachable!("nothing is dialed")
        }

        fn seed(&self) -> Option<u64> {
            self.0
        }
    }

    #[tokio::test]
    async fn credentials_thread_is_not_waited_for_in_a_run_that_is_repeated() {
        let source = CredentialsSource::Provider(Arc::new(TellsThread));
        let here = format!("{:?}", std::thread::current().id());
        for (seed, in_place) in [(None, false), (Some(7), true)] {
            let given = Aside::new(Some(&Dialer(seed))).credentials(&source).await.unwrap();
            let Secret::Password(given) = given else { panic!("{given:?}") };
            assert_eq!(given.username() == here, in_place);
        }
    }

    struct Fails(bool);

    impl ProvideCredentials for Fails {
        fn credentials(&self) -> Result<Credentials, CredentialsError> {
            assert!(!self.0, "on purpose");
            Err("the vault is sealed".into())
        }
    }

    #[tokio::test]
    async fn credentials_provider_that_fails_or_panics_is_an_error() {
        for panics in [false, true] {
            let source = CredentialsSource::Provider(Arc::new(Fails(panics)));
            let error = ask(&source).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Authentication);
            let says = if panics { "panicked" } else { "the vault is sealed" };
            assert!(crate::Chain(&error).to_string().contains(says), "{error:?}");
        }
    }
}
