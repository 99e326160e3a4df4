//! Options of connections.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dcp_proto::topology::{ConnectionString, NetworkSelection};
use dcp_wire::sasl::Mechanism;
use zeroize::Zeroizing;

use crate::{CredentialsSource, Dial};

/// Longer than any wait, but small enough to be added to an instant.
pub(crate) const YEARS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// PEM text, from a file or from memory.
#[derive(Clone)]
pub enum Pem {
    /// Read for every connection, so that it may be replaced.
    File(PathBuf),
    /// The text itself.
    Text(Zeroizing<Vec<u8>>),
}

impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Text(_) => f.write_str("Text(..)"),
        }
    }
}

/// How `couchbases://` connections are encrypted. Certificates and host names are always verified.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TlsOptions {
    /// The only certificate authorities to trust. By default those of the operating system and the
    /// one that signs the certificates of Couchbase Capella.
    pub ca: Option<Pem>,
    /// Client certificate chain and private key, instead of a user name and password.
    pub client_certificate: Option<ClientCertificate>,
}

impl TlsOptions {
    /// Whether any part of them is in files.
    pub(crate) fn has_files(&self) -> bool {
        let client = self.client_certificate.iter().flat_map(|pair| [&pair.chain, &pair.key]);
        self.ca.iter().chain(client).any(|pem| matches!(pem, Pem::File(_)))
    }
}

/// A client certificate and its key.
#[derive(Clone)]
pub struct ClientCertificate {
    /// Certificate chain, the client's certificate first.
    pub chain: Pem,
    /// Private key of the client's certificate.
    pub key: Pem,
    /// Passphrase of the key, if it is encrypted (PKCS#8). Never shown.
    pub key_password: Option<Zeroizing<String>>,
}

impl fmt::Debug for ClientCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCertificate")
            .field("chain", &self.chain)
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

/// Which nodes of a DNS service record to connect to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SrvTargets {
    /// Those in the domain of the requested name. Records of other hosts are refused with a warning
    /// in the log, or with an error if there are no others: otherwise a forged answer could send a
    /// password to any host with a certificate.
    #[default]
    SameDomain,
    /// All of them, with a warning for those outside the domain.
    Any,
}

/// How to connect.
///
/// ```
/// use std::time::Duration;
///
/// use dcp_consumer::{ConnectOptions, Credentials};
///
/// let options = ConnectOptions::new("couchbase://node1,node2/travel")
///     .with_credentials(Credentials::new("reader", "secret"))
///     .with_connect_timeout(Duration::from_secs(5));
/// assert!(!format!("{options:?}").contains("secret"));
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// `couchbase://host1,host2/bucket`, or `couchbases://` for TLS.
    pub connection_string: String,
    /// Bucket, if the connection string does not name one; it must not name a different one.
    pub bucket: Option<String>,
    /// Credentials; not needed with a client certificate.
    pub credentials: Option<CredentialsSource>,
    /// SASL mechanisms; the first one that the server offers is used. By default PLAIN and then
    /// SCRAM over TLS, which users of LDAP, PAM and saslauthd need, and only SCRAM without TLS,
    /// where PLAIN is refused.
    pub sasl_mechanisms: Option<Vec<Mechanism>>,
    /// Longest time for name resolution, TCP, TLS and set-up of one connection together.
    pub connect_timeout: Duration,
    /// How connections are encrypted, with `couchbases://`.
    pub tls: TlsOptions,
    /// Name and version of the program. The connections call themselves `agent/host/pid/name`, with
    /// this machine's name and the process id, in the server's logs and statistics.
    pub agent: String,
    /// What the connections are for, the last part of what they call themselves: 1 to 32 letters,
    /// digits, `-`, `_` and `.`. Default `client`.
    pub name: String,
    /// Which addresses of the nodes to use.
    pub network: NetworkSelection,
    /// Which nodes to accept from DNS if the connection string names a service.
    pub srv_targets: SrvTargets,
    /// How long the connections of a finished stream stay in the connection pool for the next
    /// stream of the client. Zero, the default: they are not pooled.
    ///
    /// A pooled connection must answer requests for the cluster map and the manifest before it is
    /// reused, or it is replaced.
    pub keep_connections: Duration,
    /// Makes the connections instead of TCP; without TLS.
    pub dialer: Option<Arc<dyn Dial>>,
}

impl fmt::Debug for ConnectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("ConnectOptions");
        // Parsed, without options; a string that cannot be parsed may contain a password.
        match self.connection_string.parse::<ConnectionString>() {
            Ok(parsed) => debug.field("connection_string", &format_args!("{parsed}")),
            Err(error) => debug.field("connection_string", &error),
        };
        debug
            .field("bucket", &self.bucket)
            .field("credentials", &self.credentials)
            .field("sasl_mechanisms", &self.sasl_mechanisms)
            .field("connect_timeout", &self.connect_timeout)
            .field("tls", &self.tls)
            .field("agent", &self.agent)
            .field("name", &self.name)
            .field("network", &self.network)
            .field("srv_targets", &self.srv_targets)
            .field("keep_connections", &self.keep_connections)
            .field("dialer", &self.dialer)
            .finish()
    }
}

impl ConnectOptions {
    /// Default of `connect_timeout`.
    pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

    /// Options with defaults for everything but the address.
    #[must_use]
    pub fn new(connection_string: impl Into<String>) -> Self {
        Self {
            connection_string: connection_string.into(),
            bucket: None,
            credentials: None,
            sasl_mechanisms: None,
            connect_timeout: Self::DEFAULT_CONNECT_TIMEOUT,
            tls: TlsOptions::default(),
            agent: concat!("dcp_rs:", env!("CARGO_PKG_VERSION")).to_owned(),
            name: "client".to_owned(),
            network: NetworkSelection::Auto,
            srv_targets: SrvTargets::SameDomain,
            keep_connections: Duration::ZERO,
            dialer: None,
        }
    }

    /// The same with a bucket.
    #[must_use]
    pub fn with_bucket(mut self, bucket: impl Into<String>) -> Self {
        self.bucket = Some(bucket.into());
        self
    }

    /// The same with credentials, or with a source of credentials.
    #[must_use]
    pub fn with_credentials(mut self, credentials: impl Into<CredentialsSource>) -> Self {
        self.credentials = Some(credentials.into());
        self
    }

    /// The same with connections made by a dialer instead of TCP.
    #[must_use]
    pub fn with_dialer(mut self, dialer: Arc<dyn Dial>) -> Self {
        self.dialer = Some(dialer);
        self
    }

    /// The same with other SASL mechanisms.
    #[must_use]
    pub fn with_sasl_mechanisms(mut self, mechanisms: impl Into<Vec<Mechanism>>) -> Self {
        self.sasl_mechanisms = Some(mechanisms.into());
        self
    }

    /// The same with another connect timeout.
    #[must_use]
    pub const fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// The same with another name of what the connections are for.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The same with connections pooled between streams for this long.
    #[must_use]
    pub const fn with_keep_connections(mut self, idle_time: Duration) -> Self {
        self.keep_connections = idle_time;
        self
    }

    /// The same with TLS options.
    #[must_use]
    pub fn with_tls(mut self, tls: TlsOptions) -> Self {
        self.tls = tls;
        self
    }
}
