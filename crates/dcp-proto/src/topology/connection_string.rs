//! Connection strings: `couchbase://host1,host2:11210/bucket?option=value`.

use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};
use core::str::FromStr;

use thiserror::Error;

use super::Address;

/// Whether connections are encrypted, and the default port that comes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// `couchbase://`: plain TCP, port 11210.
    Couchbase,
    /// `couchbases://`: TLS, port 11207.
    Couchbases,
}

impl Scheme {
    /// Port of the data service where the connection string names none.
    #[must_use]
    pub const fn default_port(self) -> u16 {
        match self {
            Self::Couchbase => 11210,
            Self::Couchbases => 11207,
        }
    }

    /// Whether connections are encrypted.
    #[must_use]
    pub const fn is_tls(self) -> bool {
        matches!(self, Self::Couchbases)
    }
}

/// Why text is not a connection string. Never repeats the text: a password may be in it.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidConnectionString {
    /// The scheme is neither `couchbase` nor `couchbases`.
    #[error(
        "must start with couchbase:// or couchbases:// (http addresses of the \
         web console do not work: use the data service, port 11210 or 11207)"
    )]
    Scheme,
    /// A user name or password is in it.
    #[error("must not hold a user name or password: pass them as credentials")]
    Credentials,
    /// There is no host in it, or an empty one.
    #[error("has an empty host: write couchbase://host1,host2")]
    EmptyHost,
    /// A port is not a number from 1 to 65535.
    #[error("has a port that is not a number from 1 to 65535")]
    Port,
    /// The port is the web console's, which does not speak the protocol.
    #[error(
        "port {0} is the cluster manager's: leave the port out, or use the data service's \
         (11210, with TLS 11207)"
    )]
    ManagerPort(u16),
    /// An IPv6 literal lacks one or both brackets, or the brackets contain something else.
    #[error(
        "has an IPv6 address without brackets, or brackets around something \
         else: write [::1]:11210"
    )]
    Ipv6,
    /// A host has a character that is not allowed in names.
    #[error("has a host with a bracket, a space or a control character in it")]
    Host,
    /// A `%` is not followed by two hexadecimal digits, or the decoded text is not UTF-8.
    #[error("connection string has an invalid percent escape")]
    Escape,
    /// More than one path segment.
    #[error("connection string may name one bucket after the hosts, and no further path")]
    Path,
}

/// The addresses of a cluster, and the options in the string.
///
/// ```
/// use dcp_proto::topology::{Address, ConnectionString};
///
/// let parsed: ConnectionString = "couchbases://node1,[fd00::2]:9000/travel".parse()?;
/// assert_eq!(parsed.addresses()[0], Address::new("node1", 11207));
/// assert_eq!(parsed.addresses()[1].to_string(), "[fd00::2]:9000");
/// assert_eq!(parsed.bucket(), Some("travel"));
/// # Ok::<(), dcp_proto::topology::InvalidConnectionString>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectionString {
    scheme: Scheme,
    addresses: Vec<Address>,
    bucket: Option<String>,
    params: Vec<(String, String)>,
    srv_name: Option<String>,
}

impl ConnectionString {
    /// Whether connections are encrypted.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The nodes to try first, in the order written; at least one.
    #[must_use]
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// The DNS service name that may list the nodes: a single host name without a port may stand
    /// for all of them.
    #[must_use]
    pub fn srv_name(&self) -> Option<&str> {
        self.srv_name.as_deref()
    }

    /// The bucket named after the hosts.
    #[must_use]
    pub fn bucket(&self) -> Option<&str> {
        self.bucket.as_deref()
    }

    /// Names and values after the `?`, in order.
    #[must_use]
    pub fn params(&self) -> &[(String, String)] {
        &self.params
    }

    /// The last value given for a parameter.
    #[must_use]
    pub fn param(&self, name: &str) -> Option<&str> {
        self.params.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

impl FromStr for ConnectionString {
    type Err = InvalidConnectionString;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (scheme, rest) = match text.trim().split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("couchbase") => {
                (Scheme::Couchbase, rest)
            }
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("couchbases") => {
                (Scheme::Couchbases, rest)
            }
            _ => return Err(InvalidConnectionString::Scheme),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        if hosts.contains('@') {
            return Err(InvalidConnectionString::Credentials);
        }
        let bucket = unescape(path.strip_suffix('/').unwrap_or(path))?;
        if path.strip_suffix('/').unwrap_or(path).contains('/') {
            return Err(InvalidConnectionString::Path);
        }
        Ok(Self {
            scheme,
            srv_name: srv_name(hosts.trim(), scheme),
            addresses: hosts
                .split([',', ';'])
                .map(|host| address(host.trim(), scheme))
                .collect::<Result<_, _>>()?,
            bucket: (!bucket.is_empty()).then_some(bucket),
            params: params(query)?,
        })
    }
}

impl fmt::Display for ConnectionString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.scheme.is_tls() { "couchbases://" } else { "couchbase://" })?;
        for (index, address) in self.addresses.iter().enumerate() {
            write!(f, "{}{address}", if index == 0 { "" } else { "," })?;
        }
        match &self.bucket {
            Some(bucket) => write!(f, "/{bucket}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for ConnectionString {
    /// Without the options' values, which may include secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConnectionString").field(&format_args!("{self}")).finish()
    }
}

fn srv_name(hosts: &str, scheme: Scheme) -> Option<String> {
    let is_name = !hosts.contains([',', ';', ':'])
        && hosts.parse::<Ipv4Addr>().is_err()
        && !hosts.eq_ignore_ascii_case("localhost");
    let service = if scheme.is_tls() { "couchbases" } else { "couchbase" };
    is_name.then(|| format!("_{service}._tcp.{hosts}"))
}

fn address(text: &str, scheme: Scheme) -> Result<Address, InvalidConnectionString> {
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or(InvalidConnectionString::Ipv6)?;
        // A link-local address names its interface: fe80::1%eth0.
        let (literal, _) = host.split_once('%').unwrap_or((host, ""));
        if literal.parse::<Ipv6Addr>().is_err() {
            return Err(InvalidConnectionString::Ipv6);
        }
        match rest.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if rest.is_empty() => (host, None),
            None => return Err(InvalidConnectionString::Ipv6),
        }
    } else {
        match text.split_once(':') {
            Some((_, port)) if port.contains(':') => return Err(InvalidConnectionString::Ipv6),
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        }
    };
    if host.is_empty() {
        return Err(InvalidConnectionString::EmptyHost);
    }
    if host.contains(|char: char| char.is_whitespace() || char.is_control() || "[]".contains(char))
    {
        return Err(InvalidConnectionString::Host);
    }
    let port = match port {
        None => scheme.default_port(),
        Some(port) => match port.parse() {
            Ok(port @ (8091 | 18091)) => return Err(InvalidConnectionString::ManagerPort(port)),
            Ok(port) if port != 0 => port,
            _ => return Err(InvalidConnectionString::Port),
        },
    };
    Ok(Address::new(host, port))
}

fn params(query: &str) -> Result<Vec<(String, String)>, InvalidConnectionString> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((unescape(name)?, unescape(value)?))
        })
        .collect()
}

fn unescape(text: &str) -> Result<String, InvalidConnectionString> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let (digits, tail) = tail.split_at_checked(2).ok_or(InvalidConnectionString::Escape)?;
        rest = tail;
        let digits = core::str::from_utf8(digits).map_err(|_| InvalidConnectionString::Escape)?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(InvalidConnectionString::Escape);
        }
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| InvalidConnectionString::Escape)?);
    }
    String::from_utf8(bytes).map_err(|_| InvalidConnectionString::Escape)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ConnectionString, InvalidConnectionString> {
        text.parse()
    }

    #[test]
    fn connection_string_has_hosts_ports_bucket_and_options() {
        let parsed =
            parse("couchbases://n0, [fd00::1]:9999;n2:11207/travel?network=external&x=%2F&flag")
                .unwrap();
        assert_eq!(parsed.scheme(), Scheme::Couchbases);
        let addresses: Vec<_> = parsed.addresses().iter().map(ToString::to_string).collect();
        assert_eq!(addresses, ["n0:11207", "[fd00::1]:9999", "n2:11207"]);
        assert_eq!(parsed.addresses()[1].host, "fd00::1");
        assert_eq!(parsed.bucket(), Some("travel"));
        assert_eq!(parsed.param("network"), Some("external"));
        assert_eq!((parsed.param("x"), parsed.param("flag")), (Some("/"), Some("")));
        assert_eq!(parsed.params().len(), 3);
    }

    #[test]
    fn connection_string_defaults_to_the_ports_of_the_data_service() {
        let parsed = parse("couchbase://localhost").unwrap();
        assert_eq!(parsed.addresses(), [Address::new("localhost", 11210)]);
        assert_eq!((parsed.bucket(), parsed.params().len()), (None, 0));
        assert_eq!(parse("COUCHBASES://[::1]/").unwrap().addresses()[0].port, 11207);
        assert_eq!(parse("couchbase://h/a%20b").unwrap().bucket(), Some("a b"));
    }

    #[test]
    fn connection_string_of_a_single_name_without_a_port_may_be_a_service() {
        let srv_name = |text: &str| parse(text).unwrap().srv_name().map(ToOwned::to_owned);
        let tls = srv_name("couchbases://cb.example.com/b");
        assert_eq!(tls.as_deref(), Some("_couchbases._tcp.cb.example.com"));
        assert_eq!(srv_name("couchbase://h").as_deref(), Some("_couchbase._tcp.h"));
        for text in [
            "couchbase://h:11210",
            "couchbase://a,b",
            "couchbase://1.2.3.4",
            "couchbase://[::1]",
            "couchbase://localhost",
        ] {
            assert_eq!(srv_name(text), None, "{text}");
        }
    }

    #[test]
    fn connection_string_errors_say_what_is_wrong() {
        use InvalidConnectionString as E;

        for (text, error) in [
            ("", E::Scheme),
            ("localhost", E::Scheme),
            ("http://localhost:8091", E::Scheme),
            ("couchbase://", E::EmptyHost),
            ("couchbase://a,,b", E::EmptyHost),
            ("couchbase://:11210", E::EmptyHost),
            ("couchbase:///bucket", E::EmptyHost),
            ("couchbase://h:0", E::Port),
            ("couchbase://h:65536", E::Port),
            ("couchbase://h:", E::Port),
            ("couchbase://h:8091", E::ManagerPort(8091)),
            ("couchbases://h:18091", E::ManagerPort(18091)),
            ("couchbase://::1", E::Ipv6),
            ("couchbase://[::1", E::Ipv6),
            ("couchbase://[::1]x", E::Ipv6),
            ("couchbase://[]", E::Ipv6),
            ("couchbase://[node]", E::Ipv6),
            ("couchbase://[[::1]]:9", E::Ipv6),
            ("couchbase://h],[::1]", E::Host),
            ("couchbase://a\u{c}b", E::Host),
            ("couchbase://a b", E::Host),
            ("couchbase://user:secret@h", E::Credentials),
            ("couchbase://h/b/c", E::Path),
            ("couchbase://h/%zz", E::Escape),
            ("couchbase://h/%f", E::Escape),
            ("couchbase://h/%ff", E::Escape),
        ] {
            assert_eq!(parse(text), Err(error), "{text}");
        }
    }

    #[test]
    fn connection_string_errors_do_not_repeat_a_password() {
        let error = parse("couchbase://user:secret@h").unwrap_err();
        assert!(!format!("{error} {error:?}").contains("secret"));
        let parsed = parse("couchbase://h?password=secret").unwrap();
        assert!(!parsed.to_string().contains("secret"));
        let shown = format!("{parsed:?}");
        assert!(!shown.contains("secret") && shown.contains("couchbase://h"), "{shown}");
    }
}
