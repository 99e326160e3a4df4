//! Making one connection: name resolution, TCP, TLS and set-up under one timeout.

mod errors;
mod identity;
mod seeds;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use dcp_proto::consumer::{Auth, Bootstrap, BootstrapConfig, BootstrapOutcome, DcpOpen, Token};
use dcp_proto::topology::{Address, ConnectionString, Network, NetworkSelection};
use dcp_wire::Status;
use dcp_wire::sasl::{Mechanism, SaltedPassword};
use rand::distr::Alphanumeric;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use zeroize::Zeroize;

use self::errors::{Stage, about_token, lost, set_up_failed};
use crate::config::YEARS;
use crate::credentials::{Aside, Secret};
pub use crate::socket::Socket;
use crate::{Chain, ConnectOptions, CredentialsSource, Error, ErrorKind, dial, tls};

/// Length of a SCRAM nonce, in characters of 62.
const NONCE_LEN: usize = 32;

/// The configuration of a client's connections: options and certificates are checked once, so that
/// mistakes are reported immediately. Files are read again for every connection.
///
/// Cheap to clone.
#[derive(Clone)]
pub struct Connector {
    shared: Arc<Shared>,
}

struct Shared {
    options: ConnectOptions,
    connection_string: ConnectionString,
    network: NetworkSelection,
    /// `None` without TLS.
    tls: Option<TlsConnector>,
    aside: Aside,
    /// What the connections call themselves.
    identity: String,
    /// First half of the connection ids in the server's logs, which identifies the client.
    client_id: u64,
    /// The password of its connections, salted.
    salted: SaltedPassword,
    randomness: Mutex<StdRng>,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("connection_string", &self.shared.connection_string)
            .finish_non_exhaustive()
    }
}

/// Identity of one connection among all connections of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ConnectionId(pub(crate) u64);

/// A connection that has been set up.
#[derive(Debug)]
pub struct Connected {
    /// The socket, encrypted or not.
    pub socket: Socket,
    /// Bytes that arrived after the last answer of the set-up: feed them first.
    pub leftover: BytesMut,
    /// What was negotiated and fetched.
    pub outcome: BootstrapOutcome,
    /// Address of the peer.
    pub address: Address,
    /// The token that the server accepted, if it was one.
    pub token: Option<Token>,
}

impl Connector {
    /// Checks the options and reads the certificates.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a wrong option, [`ErrorKind::Tls`] for certificates that cannot
    /// be used.
    pub fn new(options: ConnectOptions) -> Result<Self, Error> {
        let connection_string: ConnectionString = options.connection_string.parse().map_err(
            |error: dcp_proto::topology::InvalidConnectionString| {
                Error::option(&["connection_string"], error.to_string())
            },
        )?;
        check(&options, &connection_string)?;
        let network = network(&options, &connection_string)?;
        let tls = match connection_string.scheme().is_tls() {
            true => Some(tls::connector(&options.tls)?),
            false => None,
        };
        let identity = identity::of(&options);
        let mut randomness = dial::randomness(options.dialer.as_deref());
        let client_id = randomness.random();
        let mut options = options;
        options.connect_timeout = options.connect_timeout.min(YEARS);
        options.keep_connections = options.keep_connections.min(YEARS);
        let (aside, randomness) = (Aside::new(options.dialer.as_deref()), Mutex::new(randomness));
        let shared = Shared {
            options,
            connection_string,
            network,
            tls,
            aside,
            identity,
            client_id,
            salted: SaltedPassword::default(),
            randomness,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Adds to an error about missing privileges which user lacks them.
    pub(crate) fn explain(&self, error: Error) -> Error {
        let is_denied = error.kind() == ErrorKind::AccessDenied
            || (error.kind(), error.status()) == (ErrorKind::Status, Some(Status::EACCESS));
        if !is_denied {
            return error;
        }
        let user = match &self.shared.options.credentials {
            Some(source) if source.token_option().is_some() => "the user of the token".to_owned(),
            Some(source) => source
                .username()
                .map_or_else(|| "the user".to_owned(), |name| format!("user '{name}'")),
            None => "the user of the client certificate".to_owned(),
        };
        let bucket = self.bucket().unwrap_or_default();
        let message = format!(
            "{user} lacks rights in bucket '{bucket}': grant the role 'Data DCP Reader' \
             (data_dcp_reader) on the bucket, or on the scopes and collections that are read \
             ({error})"
        );
        error.with_kind(ErrorKind::AccessDenied).with_message(message)
    }

    /// A new generator for each caller.
    pub(crate) fn randomness(&self) -> StdRng {
        StdRng::from_rng(
            &mut *self.shared.randomness.lock().unwrap_or_else(PoisonError::into_inner),
        )
    }

    /// A name for one DCP connection. It is unique, since the server ends an older connection of the
    /// same name.
    pub(crate) fn connection_name(&self) -> String {
        identity::unique(&self.shared.identity, self.randomness().random())
    }

    /// The options as given.
    #[must_use]
    pub fn options(&self) -> &ConnectOptions {
        &self.shared.options
    }

    /// The connection string, parsed.
    #[must_use]
    pub fn connection_string(&self) -> &ConnectionString {
        &self.shared.connection_string
    }

    /// The bucket, from the options or the connection string.
    #[must_use]
    pub fn bucket(&self) -> Option<&str> {
        self.shared.options.bucket.as_deref().or(self.shared.connection_string.bucket())
    }

    /// Which addresses of the nodes to use, from the options or the connection string.
    #[must_use]
    pub fn network(&self) -> NetworkSelection {
        self.shared.network
    }

    /// Whether connections are encrypted.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.shared.tls.is_some()
    }

    /// Connects to one node and sets the connection up, with DCP opened if `dcp` is given.
    ///
    /// Cancellation-safe: dropping the future closes the connection.
    ///
    /// # Errors
    /// [`Error`] that says what to check, within the connect timeout.
    pub async fn connect(
        &self,
        address: &Address,
        dcp: Option<DcpOpen>,
    ) -> Result<Connected, Error> {
        self.connect_with(address, |config| config.dcp = dcp).await
    }

    /// The same with a given limit for the whole set-up.
    pub(crate) async fn connect_in(
        &self,
        limit: Duration,
        address: &Address,
        dcp: Option<DcpOpen>,
    ) -> Result<Connected, Error> {
        self.connect_within(limit, address, |config| config.dcp = dcp).await
    }

    /// The same with a customized bootstrap.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_with(
        &self,
        address: &Address,
        adjust: impl FnOnce(&mut BootstrapConfig),
    ) -> Result<Connected, Error> {
        self.connect_within(self.shared.options.connect_timeout, address, adjust).await
    }

    async fn connect_within(
        &self,
        limit: Duration,
        address: &Address,
        adjust: impl FnOnce(&mut BootstrapConfig),
    ) -> Result<Connected, Error> {
        let mut stage = Stage::Credentials;
        let attempt = Box::pin(async {
            let begun = Instant::now();
            let secret = self.secret().await?;
            let mut config = self.bootstrap_config(address, secret.as_ref());
            adjust(&mut config);
            stage = Stage::Resolve;
            let remaining = limit.saturating_sub(begun.elapsed());
            self.attempt(remaining, address, config, secret, &mut stage).await
        });
        match timeout(limit, attempt).await {
            Ok(result) => result,
            Err(_) => Err(stage.timed_out(address, limit)),
        }
    }

    /// A token for a connection whose token is about to expire; `None`, with a warning, if there is none.
    pub(crate) async fn newer_token(&self, address: Address) -> Option<Token> {
        let limit = self.shared.options.connect_timeout;
        match timeout(limit, self.secret()).await {
            Ok(Ok(Some(Secret::Token(token)))) => return Some(token),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                tracing::warn!(name: "token_not_renewed", node = %address, error = %Chain(&error), "there is no newer token");
            }
            Err(_) => {
                tracing::warn!(name: "token_not_renewed", node = %address, "no newer token came within {limit:?}");
            }
        }
        None
    }

    /// What the client authenticates with; `None` with a client certificate.
    async fn secret(&self) -> Result<Option<Secret>, Error> {
        match &self.shared.options.credentials {
            Some(source) => self.shared.aside.credentials(source).await.map(Some),
            None => Ok(None),
        }
    }

    /// The TLS connector; `None` without TLS.
    async fn tls(&self) -> Result<Option<TlsConnector>, Error> {
        let options = &self.shared.options.tls;
        if self.shared.tls.is_none() || !options.has_files() {
            return Ok(self.shared.tls.clone());
        }
        let options = options.clone();
        self.shared.aside.read(move || tls::connector(&options)).await.map(Some)
    }

    /// Makes one connection, with a configuration made for this secret.
    async fn attempt(
        &self,
        limit: Duration,
        address: &Address,
        config: BootstrapConfig,
        secret: Option<Secret>,
        stage: &mut Stage,
    ) -> Result<Connected, Error> {
        let connected = self.set_up(limit, address, config, stage).await;
        let Some(Secret::Token(token)) = secret else { return connected };
        match connected {
            Ok(connected) => Ok(Connected { token: Some(token), ..connected }),
            Err(error) => Err(about_token(error, &token, since_1970())),
        }
    }

    async fn set_up(
        &self,
        limit: Duration,
        address: &Address,
        config: BootstrapConfig,
        stage: &mut Stage,
    ) -> Result<Connected, Error> {
        let deadline = Instant::now() + limit;
        let mut socket = match &self.shared.options.dialer {
            Some(dialer) => {
                *stage = Stage::Tcp;
                Socket::Dialed(dial::dial(dialer.as_ref(), address).await?)
            }
            None => self.open_socket(deadline, address, stage).await?,
        };
        *stage = Stage::Bootstrap { heard: false };
        let (outcome, leftover) = bootstrap(&mut socket, address, config, stage).await?;
        Ok(Connected { socket, leftover, outcome, address: address.clone(), token: None })
    }

    async fn open_socket(
        &self,
        deadline: Instant,
        address: &Address,
        stage: &mut Stage,
    ) -> Result<Socket, Error> {
        let resolved = resolve(address).await?;
        *stage = Stage::Tcp;
        let stream = connect_tcp(deadline, address, &resolved).await?;
        *stage = Stage::Tls;
        let Some(tls) = self.tls().await? else { return Ok(Socket::Plain(stream)) };
        Ok(Socket::Tls(Box::new(encrypt(&tls, address, stream).await?)))
    }

    /// The SASL mechanisms. Users of external services such as LDAP can only use PLAIN, since the
    /// service needs the password, and servers offer all mechanisms to everyone: so PLAIN comes
    /// first if the server was verified, and is not used otherwise.
    fn mechanisms(&self) -> Vec<Mechanism> {
        match &self.shared.options.sasl_mechanisms {
            Some(mechanisms) => mechanisms.clone(),
            None if self.is_tls() => [&[Mechanism::Plain], &Mechanism::SCRAM[..]].concat(),
            None => Mechanism::SCRAM.to_vec(),
        }
    }

    fn bootstrap_config(&self, address: &Address, secret: Option<&Secret>) -> BootstrapConfig {
        let auth = match secret {
            None => Auth::Certificate,
            Some(Secret::Token(token)) => Auth::Token(token.clone()),
            Some(Secret::Password(credentials)) => Auth::Password {
                username: credentials.username().to_owned(),
                password: credentials.password().clone(),
                nonce: self
                    .randomness()
                    .sample_iter(Alphanumeric)
                    .take(NONCE_LEN)
                    .map(char::from)
                    .collect(),
                mechanisms: self.mechanisms(),
            },
        };
        let bucket = self.bucket().map(ToOwned::to_owned);
        let mut config = BootstrapConfig::new(auth, bucket, address.host.as_str());
        config.salted = self.shared.salted.clone();
        config.agent.clone_from(&self.shared.identity);
        let connection_id: u64 = self.randomness().random();
        config.connection_id = format!("{:016x}/{connection_id:016x}", self.shared.client_id);
        config
    }
}

fn check(options: &ConnectOptions, connection_string: &ConnectionString) -> Result<(), Error> {
    let wrong = |options, problem: &str| Err(Error::option(options, problem));
    if let Some(source) = &options.credentials {
        check_token(source, options, connection_string)?;
    }
    if let (Some(option), Some(written)) = (&options.bucket, connection_string.bucket())
        && option != written
    {
        return wrong(&["bucket", "connection_string"], "name different buckets: name it once");
    }
    if options.bucket.as_deref() == Some("") {
        return wrong(&["bucket"], "must not be empty");
    }
    if options.dialer.is_some() && connection_string.scheme().is_tls() {
        return wrong(&["dialer"], "makes connections without TLS: use couchbase://");
    }
    if let Some(mechanisms) = &options.sasl_mechanisms {
        if mechanisms.is_empty() {
            return wrong(&["sasl_mechanisms"], "names none: name one, or leave it out");
        }
        let reveals = mechanisms.iter().any(|mechanism| mechanism.reveals_password());
        if mechanisms.contains(&Mechanism::OAuthBearer) {
            return wrong(&["sasl_mechanisms"], "OAUTHBEARER is for tokens only: leave it out");
        }
        if reveals && !connection_string.scheme().is_tls() {
            return wrong(
                &["sasl_mechanisms"],
                "PLAIN would send the password unencrypted: use couchbases://",
            );
        }
    }
    if !identity::is_name(&options.name) {
        let problem = "must be 1 to 32 letters, digits, '-', '_' or '.'";
        return Err(Error::option(&["name"], problem).with_value(options.name.as_str()));
    }
    if options.connect_timeout.is_zero() {
        return wrong(&["connect_timeout"], "must be more than zero");
    }
    let certificate = options.tls.client_certificate.is_some();
    match (&options.credentials, certificate) {
        (None, false) => wrong(
            &["username"],
            "no user is given: pass one and a password, or with couchbases:// a token, or a client \
             certificate and its key",
        ),
        (Some(_), true) => wrong(
            &["username", "tls_certificate"],
            "give either a user name and password or a client certificate, not both",
        ),
        (None, true) if !connection_string.scheme().is_tls() => {
            wrong(&["tls_certificate"], "a client certificate needs couchbases://")
        }
        _ if options.tls.ca.is_some() && !connection_string.scheme().is_tls() => wrong(
            &["tls_ca"],
            "a CA certificate is given but the connection would not be encrypted: use \
             couchbases://",
        ),
        _ => Ok(()),
    }
}

/// Whether a token, if it is one, has a connection that it may be sent over, and no rival.
fn check_token(
    source: &CredentialsSource,
    options: &ConnectOptions,
    connection_string: &ConnectionString,
) -> Result<(), Error> {
    let (alone, with_mechanisms, with_certificate): (&[_], &[_], &[_]) = match source.token_option()
    {
        None => return Ok(()),
        Some("token_file") => (
            &["token_file"],
            &["sasl_mechanisms", "token_file"],
            &["token_file", "tls_certificate"],
        ),
        Some(_) => (&["token"], &["sasl_mechanisms", "token"], &["token", "tls_certificate"]),
    };
    if !connection_string.scheme().is_tls() {
        return Err(Error::option(alone, "would be sent unencrypted: use couchbases://"));
    }
    if options.sasl_mechanisms.is_some() {
        let problem = "a token has a mechanism of its own: leave the mechanisms out";
        return Err(Error::option(with_mechanisms, problem));
    }
    if options.tls.client_certificate.is_some() {
        return Err(Error::option(with_certificate, "give one of them"));
    }
    Ok(())
}

/// The time of the wall, as tokens count it.
pub(crate) fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn network(
    options: &ConnectOptions,
    connection_string: &ConnectionString,
) -> Result<NetworkSelection, Error> {
    match connection_string.param("network") {
        None => Ok(options.network),
        Some("auto") => Ok(NetworkSelection::Auto),
        Some("default") => Ok(NetworkSelection::Fixed(Network::Default)),
        Some("external") => Ok(NetworkSelection::Fixed(Network::External)),
        Some(_) => {
            let problem = "its network must be auto, default or external";
            Err(Error::option(&["connection_string"], problem))
        }
    }
}

/// Time until `deadline` for each of `attempts`.
fn share(deadline: Instant, attempts: usize) -> Duration {
    let remaining = deadline.saturating_duration_since(Instant::now());
    remaining / u32::try_from(attempts).unwrap_or(u32::MAX).max(1)
}

async fn resolve(address: &Address) -> Result<Vec<SocketAddr>, Error> {
    let failed = || {
        let message = format!(
            "host name '{}' could not be resolved: check the connection string",
            address.host
        );
        Error::new(ErrorKind::Connect, message)
    };
    let lookup = tokio::net::lookup_host((address.host.as_str(), address.port)).await;
    let resolved: Vec<_> = lookup.map_err(|error| failed().with_source(error))?.collect();
    if resolved.is_empty() { Err(failed()) } else { Ok(resolved) }
}

/// Tries the addresses in turn; none may use up the time of the following ones.
async fn connect_tcp(
    deadline: Instant,
    address: &Address,
    resolved: &[SocketAddr],
) -> Result<TcpStream, Error> {
    let (mut last, limit) = (None, share(deadline, 1));
    for (index, &socket_address) in resolved.iter().enumerate() {
        let share = share(deadline, resolved.len().saturating_sub(index));
        match timeout_at(Instant::now() + share, TcpStream::connect(socket_address)).await {
            Ok(Ok(stream)) => {
                // Requests are small, and each is awaited.
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "TCP_NODELAY is not available");
                }
                return Ok(stream);
            }
            Ok(Err(error)) => last = Some(error),
            Err(_) => last = Some(io::ErrorKind::TimedOut.into()),
        }
    }
    let error = last.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into());
    let message = match error.kind() {
        io::ErrorKind::ConnectionRefused => format!(
            "connection to {address} refused: check the port (11210, with TLS 11207) and that \
             the data service runs"
        ),
        io::ErrorKind::TimedOut => {
            return Err(Stage::Tcp.timed_out(address, limit).with_source(error));
        }
        _ => format!("{address} is unreachable: check the host name and the network"),
    };
    Err(Error::new(ErrorKind::Connect, message).with_source(error))
}

async fn encrypt(
    tls: &TlsConnector,
    address: &Address,
    stream: TcpStream,
) -> Result<tokio_rustls::client::TlsStream<TcpStream>, Error> {
    let name = ServerName::try_from(address.host.clone()).map_err(|error| {
        let problem =
            format!("'{}' is not a host name that a certificate can contain", address.host);
        Error::option(&["connection_string"], problem).with_source(error)
    })?;
    tls.connect(name, stream).await.map_err(|error| {
        let message = format!("TLS handshake with {address} failed: {}", tls::advice(&error));
        Error::new(ErrorKind::Tls, message).with_source(error)
    })
}

async fn bootstrap(
    socket: &mut (impl AsyncRead + AsyncWrite + Unpin),
    address: &Address,
    config: BootstrapConfig,
    stage: &mut Stage,
) -> Result<(BootstrapOutcome, BytesMut), Error> {
    let refused = |error| set_up_failed(address, &error);
    let mut machine = Bootstrap::new(config).map_err(refused)?;
    let mut input = BytesMut::with_capacity(64 * 1024);
    let mut output = BytesMut::new();
    let mut heard = false;
    loop {
        while machine.poll_transmit(&mut output) {
            let sent = async {
                socket.write_all(&output).await?;
                socket.flush().await
            };
            let sent = sent.await;
            output.zeroize();
            output.clear();
            sent.map_err(|error| lost(address, heard, Some(error)))?;
        }
        if let Some(outcome) = machine.take_outcome() {
            return Ok((outcome, input));
        }
        match socket.read_buf(&mut input).await {
            Ok(0) => return Err(lost(address, heard, None)),
            Ok(_) => heard = true,
            Err(error) => return Err(lost(address, heard, Some(error))),
        }
        *stage = Stage::Bootstrap { heard };
        machine.handle_bytes(&mut input).map_err(refused)?;
    }
}
