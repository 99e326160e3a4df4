//! TLS: reads certificates and verifies peers.

use std::sync::Arc;

use pkcs8::EncryptedPrivateKeyInfoRef;
use pkcs8::der::{ErrorKind as DerErrorKind, SecretDocument};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use crate::config::{ClientCertificate, Pem, TlsOptions};
use crate::{Error, ErrorKind};

/// The authority that signs the certificates of Couchbase Capella, which operating systems do not
/// include. It expires on 2029-12-06, and has the SHA-256 fingerprint
/// D0937E9C934B2DAB94ED7A4B91C548E7 9EECCA992B27AB6D2620807E68657C0E.
const CAPELLA: &[u8] = include_bytes!("capella.pem");

/// Begin and end of an encrypted PKCS#8 private key in PEM.
const ENCRYPTED: (&str, &str) =
    ("-----BEGIN ENCRYPTED PRIVATE KEY-----", "-----END ENCRYPTED PRIVATE KEY-----");

/// The connector for `options`: certificate and host name of the peer are verified.
pub(crate) fn connector(options: &TlsOptions) -> Result<TlsConnector, Error> {
    // Names the provider explicitly, so that another crate's default cannot replace it.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable("TLS could not be set up").with_source(error))?
        .with_root_certificates(roots(options.ca.as_ref())?);
    let config = match &options.client_certificate {
        None => builder.with_no_client_auth(),
        Some(ClientCertificate { chain, key, key_password }) => {
            let chain = certificates(chain, &named("client certificate", chain))?;
            let key = private_key(key, key_password.as_ref().map(|password| password.as_str()))?;
            builder.with_client_auth_cert(chain, key).map_err(|error| {
                unusable("the client certificate and the private key do not match")
                    .with_source(error)
            })?
        }
    };
    Ok(TlsConnector::from(Arc::new(config)))
}

fn roots(ca: Option<&Pem>) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    if let Some(ca) = ca {
        let what = named("CA certificate", ca);
        for certificate in certificates(ca, &what)? {
            roots
                .add(certificate)
                .map_err(|error| unusable(format!("{what} cannot be used")).with_source(error))?;
        }
        return Ok(roots);
    }
    let native = rustls_native_certs::load_native_certs();
    // Operating systems include certificates that rustls does not accept; the others are enough.
    let (added, _) = roots.add_parsable_certificates(native.certs);
    if added == 0 {
        tracing::warn!(
            name: "no_system_authorities",
            "the operating system has no certificate authorities: name a file of those to trust"
        );
    }
    roots.add_parsable_certificates(CertificateDer::pem_slice_iter(CAPELLA).flatten());
    Ok(roots)
}

fn certificates(pem: &Pem, what: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let text = read(pem, what)?;
    let wrong = |error: pem::Error| unusable(format!("{what} is not PEM")).with_source(error);
    let certificates: Vec<_> =
        CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(wrong)?;
    if certificates.is_empty() {
        return Err(unusable(format!("{what} holds no PEM certificate")));
    }
    Ok(certificates)
}

fn private_key(pem: &Pem, password: Option<&str>) -> Result<PrivateKeyDer<'static>, Error> {
    let what = named("private key", pem);
    let bytes = read(pem, &what)?;
    let text = std::str::from_utf8(&bytes).unwrap_or_default();
    let encrypted = text.find(ENCRYPTED.0).and_then(|begin| text.get(begin..));
    if let Some(encrypted) = encrypted {
        let end = encrypted.find(ENCRYPTED.1).map(|end| end + ENCRYPTED.1.len());
        let key = end.and_then(|end| encrypted.get(..end)).unwrap_or(encrypted);
        return decrypted(key, password);
    }
    if text.contains("Proc-Type: 4,ENCRYPTED") {
        return Err(unusable(
            "the private key is encrypted in OpenSSL's traditional form, which is weak and not \
             supported: convert it with `openssl pkcs8 -topk8 -v2 aes-256-cbc -in OLD -out NEW`, \
             and give its passphrase",
        ));
    }
    PrivateKeyDer::from_pem_slice(&bytes)
        .map_err(|error| unusable(format!("{what} is not a PEM key")).with_source(error))
}

/// The private key in an encrypted PKCS#8 section.
fn decrypted(pem: &str, password: Option<&str>) -> Result<PrivateKeyDer<'static>, Error> {
    let password =
        password.ok_or_else(|| unusable("the private key is encrypted: give its passphrase"))?;
    let damaged = || unusable("the private key is damaged");
    let (_, der) = SecretDocument::from_pem(pem).map_err(|error| damaged().with_source(error))?;
    let key = EncryptedPrivateKeyInfoRef::try_from(der.as_bytes());
    match key.and_then(|key| key.decrypt(password)) {
        Ok(key) => Ok(PrivatePkcs8KeyDer::from(key.as_bytes().to_vec()).into()),
        Err(error) => Err(why_not_decrypted(&error).with_source(error)),
    }
}

fn why_not_decrypted(error: &pkcs8::Error) -> Error {
    use pkcs8::pkcs5::Error as Cipher;

    let is_unsupported = match error {
        pkcs8::Error::Asn1(error) => matches!(error.kind(), DerErrorKind::OidUnknown { .. }),
        pkcs8::Error::EncryptedPrivateKey(error) => matches!(
            error,
            Cipher::UnsupportedAlgorithm { .. }
                | Cipher::NoPbes1CryptSupport
                | Cipher::AlgorithmParametersInvalid { .. }
        ),
        _ => false,
    };
    unusable(match is_unsupported {
        true => {
            "the private key is encrypted in a way that is not supported: convert it with `openssl \
             pkcs8 -topk8 -v2 aes-256-cbc -in OLD -out NEW`"
        }
        false => {
            "the private key cannot be decrypted: check its passphrase, and that the file is not \
             damaged"
        }
    })
}

/// What errors call a certificate or key, with its file.
fn named(what: &str, pem: &Pem) -> String {
    match pem {
        Pem::Text(_) => format!("the {what}"),
        Pem::File(path) => format!("the {what} in {}", path.display()),
    }
}

fn read(pem: &Pem, what: &str) -> Result<Zeroizing<Vec<u8>>, Error> {
    match pem {
        Pem::Text(text) => Ok(text.clone()),
        Pem::File(path) => std::fs::read(path)
            .map(Zeroizing::new)
            .map_err(|error| unusable(format!("{what} could not be read")).with_source(error)),
    }
}

/// What to check after the server ended the connection with an alert.
pub(crate) fn alert_advice(error: &std::io::Error) -> Option<&'static str> {
    matches!(rustls_error(error)?, rustls::Error::AlertReceived(_)).then(|| advice(error))
}

fn rustls_error(error: &std::io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// What to check after a handshake failed.
pub(crate) fn advice(error: &std::io::Error) -> &'static str {
    match rustls_error(error) {
        Some(rustls::Error::InvalidCertificate(certificate)) => certificate_advice(certificate),
        Some(rustls::Error::InvalidMessage(_)) => {
            "the port does not speak TLS: use couchbase://, or the TLS port (11207)"
        }
        Some(rustls::Error::AlertReceived(AlertDescription::ProtocolVersion)) => {
            "the server speaks neither TLS 1.2 nor 1.3: enable one of them (Couchbase Server: \
             tlsMinVersion)"
        }
        Some(rustls::Error::AlertReceived(AlertDescription::UnrecognisedName)) => {
            "the server has no certificate for this host name: connect by a name it knows"
        }
        Some(rustls::Error::AlertReceived(_)) => {
            "check whether the server wants a client certificate, and trusts the one given"
        }
        None => {
            "the peer closed the connection: check that the port speaks TLS (11207), else use \
             couchbase://"
        }
        Some(_) => "make the server accept TLS 1.2 or 1.3 with a current cipher suite",
    }
}

fn certificate_advice(error: &CertificateError) -> &'static str {
    match error {
        // A bad signature comes from an authority with the same name as a trusted one.
        CertificateError::BadSignature | CertificateError::UnknownIssuer => {
            "no trusted authority signed the server's certificate: give the cluster's CA \
             certificate as the one to trust"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "the server's certificate is for another host name: connect by a name in it"
        }
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => {
            "the server's certificate is not valid now: check its dates and this machine's clock"
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "the server's certificate is not for servers: give the nodes one whose extended key \
             usage, if any, includes serverAuth"
        }
        CertificateError::Other(other) => match other.0.to_string().as_str() {
            "CaUsedAsEndEntity" => {
                "the server uses the certificate of an authority (CA:TRUE) as its own: give the \
                 nodes a certificate that the authority has signed"
            }
            "UnsupportedCertVersion" => {
                "the server's certificate is older than X.509 version 3: give the nodes a new one"
            }
            _ => "the server's certificate was rejected: see the cause",
        },
        _ => "the server's certificate was rejected: see the cause",
    }
}

fn unusable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Tls, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_capella(roots: &RootCertStore) -> bool {
        let has = |part: &[u8], subject: &[u8]| subject.windows(part.len()).any(|at| at == part);
        roots
            .subjects()
            .iter()
            .any(|name| has(b"Couchbase", name.as_ref()) && has(b"Cloud", name.as_ref()))
    }

    #[test]
    fn tls_trusts_the_authority_of_capella_unless_others_are_named() {
        assert!(has_capella(&roots(None).unwrap()));
        let key = rcgen::KeyPair::generate().unwrap();
        let own = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        let own = Pem::Text(own.pem().into_bytes().into());
        let roots = roots(Some(&own)).unwrap();
        assert_eq!(roots.len(), 1);
        assert!(!has_capella(&roots));
    }
}
