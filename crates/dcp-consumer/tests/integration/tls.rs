use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dcp_consumer::connect::{Connected, Connector};
use dcp_consumer::{ClientCertificate, ConnectOptions, Error, ErrorKind, Mechanism, Pem};
use dcp_wire::{Opcode, Status};
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;

use crate::data_service::{DataService, options, serve};

/// A certificate authority made for one test.
struct Authority {
    pem: String,
    der: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

struct Signed {
    certificate: rcgen::Certificate,
    key: KeyPair,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        Self {
            pem: certificate.pem(),
            der: certificate.der().clone(),
            issuer: Issuer::new(params, key),
        }
    }

    fn sign(&self, params: &CertificateParams) -> Signed {
        let key = KeyPair::generate().unwrap();
        Signed { certificate: params.signed_by(&key, &self.issuer).unwrap(), key }
    }

    /// A server with a certificate for `name`.
    async fn serve(&self, name: &str, client_certificates: bool) -> SocketAddr {
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        self.serve_with(&params, client_certificates).await
    }

    async fn serve_with(
        &self,
        params: &CertificateParams,
        client_certificates: bool,
    ) -> SocketAddr {
        let Signed { certificate, key } = self.sign(params);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = if client_certificates {
            let mut roots = RootCertStore::empty();
            roots.add(self.der.clone()).unwrap();
            builder.with_client_cert_verifier(
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                    .build()
                    .unwrap(),
            )
        } else {
            builder.with_no_client_auth()
        };
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let config = builder.with_single_cert(vec![certificate.der().clone()], key).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        serve(move |stream| {
            let acceptor = acceptor.clone();
            async move {
                if let Ok(stream) = acceptor.accept(stream).await {
                    // The user is one of LDAP: every mechanism is offered, and one works.
                    let mut service = DataService::refusing(Opcode::SASL_STEP, Status::AUTH_ERROR);
                    service.login.mechanisms = b"SCRAM-SHA512 SCRAM-SHA1 PLAIN";
                    service.run(stream).await;
                }
            }
        })
        .await
    }

    fn trusted(&self) -> Pem {
        Pem::Text(self.pem.clone().into_bytes().into())
    }
}

fn encrypted(address: SocketAddr, ca: Pem) -> ConnectOptions {
    let mut options = options(format!("couchbases://{address}"));
    options.tls.ca = Some(ca);
    options
}

async fn connect(options: ConnectOptions) -> Result<Connected, Error> {
    let connector = Connector::new(options)?;
    connector.connect_any().await
}

#[track_caller]
fn assert_tls_error(error: &Error, says: &str) {
    assert_eq!(error.kind(), ErrorKind::Tls, "{error:?}");
    assert!(error.to_string().contains(says), "'{error}' does not say '{says}'");
}

#[tokio::test]
async fn server_whose_authority_is_trusted_may_have_the_password() {
    let authority = Authority::new();
    let address = authority.serve("127.0.0.1", false).await;
    let connected = connect(encrypted(address, authority.trusted())).await.unwrap();
    assert!(connected.socket.is_tls());

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, &authority.pem).unwrap();
    connect(encrypted(address, Pem::File(file))).await.unwrap();
}

#[tokio::test]
async fn certificate_files_are_read_again_at_every_connection() {
    let (old, new) = (Authority::new(), Authority::new());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, &old.pem).unwrap();
    let address = new.serve("127.0.0.1", false).await;
    let connector = Connector::new(encrypted(address, Pem::File(file.clone()))).unwrap();
    let error = connector.connect_any().await.unwrap_err();
    assert_tls_error(&error, "give the cluster's CA");
    std::fs::write(&file, &new.pem).unwrap();
    connector.connect_any().await.unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_tls_error(&connector.connect_any().await.unwrap_err(), "ca.pem");
}

#[tokio::test]
async fn certificate_that_no_trusted_authority_signed_is_refused() {
    let address = Authority::new().serve("127.0.0.1", false).await;
    let error = connect(encrypted(address, Authority::new().trusted())).await.unwrap_err();
    assert_tls_error(&error, "give the cluster's CA");
}

#[tokio::test]
async fn certificate_of_a_private_authority_is_unknown_to_the_system() {
    let address = Authority::new().serve("127.0.0.1", false).await;
    let options = options(format!("couchbases://{address}"));
    let error = connect(options).await.unwrap_err();
    assert_tls_error(&error, "CA certificate");
}

#[tokio::test]
async fn certificate_for_another_host_is_refused() {
    let authority = Authority::new();
    let address = authority.serve("elsewhere.example", false).await;
    let error = connect(encrypted(address, authority.trusted())).await.unwrap_err();
    assert_tls_error(&error, "another host name");
}

#[tokio::test]
async fn certificate_that_expired_is_refused() {
    let authority = Authority::new();
    let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    params.not_before = date_time_ymd(2019, 1, 1);
    params.not_after = date_time_ymd(2020, 1, 1);
    let address = authority.serve_with(&params, false).await;
    let error = connect(encrypted(address, authority.trusted())).await.unwrap_err();
    assert_tls_error(&error, "not valid now");
}

#[tokio::test]
async fn certificate_that_is_not_for_servers_is_refused_with_advice() {
    let authority = Authority::new();
    let params = || CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let (mut of_authority, mut of_client) = (params(), params());
    of_authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    of_client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    for (params, says) in [
        (of_authority, "give the nodes a certificate that the authority has signed"),
        (of_client, "includes serverAuth"),
    ] {
        let address = authority.serve_with(&params, false).await;
        let error = connect(encrypted(address, authority.trusted())).await.unwrap_err();
        assert_tls_error(&error, says);
    }
}

#[tokio::test]
async fn client_certificate_stands_in_for_the_password() {
    let authority = Authority::new();
    let address = authority.serve("127.0.0.1", true).await;
    let client = authority.sign(&CertificateParams::new(vec!["user".to_owned()]).unwrap());
    let mut options = encrypted(address, authority.trusted());
    options.credentials = None;
    options.tls.client_certificate = Some(ClientCertificate {
        chain: Pem::Text(client.certificate.pem().into_bytes().into()),
        key: Pem::Text(client.key.serialize_pem().into_bytes().into()),
        key_password: None,
    });
    assert!(!format!("{options:?}").contains("PRIVATE"));
    connect(options).await.unwrap();
}

#[tokio::test]
async fn server_that_wants_a_client_certificate_says_so() {
    let authority = Authority::new();
    let address = authority.serve("127.0.0.1", true).await;
    let error = connect(encrypted(address, authority.trusted())).await.unwrap_err();
    assert_tls_error(&error, "client certificate");
}

#[tokio::test]
async fn sasl_mechanisms_that_are_named_are_used_and_no_others() {
    let authority = Authority::new();
    let address = authority.serve("127.0.0.1", false).await;
    let encrypted = |mechanisms: &[Mechanism]| {
        encrypted(address, authority.trusted()).with_sasl_mechanisms(mechanisms)
    };
    assert!(connect(encrypted(&[Mechanism::ScramSha256, Mechanism::Plain])).await.is_ok());
    let refused = connect(encrypted(&Mechanism::SCRAM)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Authentication, "no second try with another");
    let not_offered = connect(encrypted(&[Mechanism::ScramSha256])).await.unwrap_err();
    assert_eq!(not_offered.kind(), ErrorKind::Authentication);
    let none = connect(encrypted(&[])).await.unwrap_err();
    assert_eq!(none.kind(), ErrorKind::Config);

    let service = DataService::default().start().await;
    let open = |mechanisms: &[Mechanism]| {
        options(format!("couchbase://{service}")).with_sasl_mechanisms(mechanisms)
    };
    let error = connect(open(&[Mechanism::ScramSha1, Mechanism::Plain])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "anybody could listen");
    assert!(connect(open(&[Mechanism::ScramSha1])).await.is_ok());
}

#[tokio::test]
async fn tls_port_addressed_plainly_is_recognised() {
    let address = Authority::new().serve("127.0.0.1", false).await;
    let error = connect(options(format!("couchbase://{address}"))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotCouchbase);
    assert!(error.to_string().contains("couchbases://"), "{error}");
}

#[tokio::test]
async fn plain_port_addressed_with_tls_is_recognised() {
    let authority = Authority::new();
    let closes = DataService::default().start().await;
    let error = connect(encrypted(closes, authority.trusted())).await.unwrap_err();
    assert_tls_error(&error, "couchbase://");

    let answers = serve(|mut stream| async move {
        let mut hello = [0; 16];
        let _ = stream.read_exact(&mut hello).await;
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        let _ = stream.read(&mut hello).await;
    });
    let error = connect(encrypted(answers.await, authority.trusted())).await.unwrap_err();
    assert_tls_error(&error, "does not speak TLS");
}

#[tokio::test]
async fn port_that_is_silent_times_out() {
    let address = serve(|stream| async move {
        let _open = stream;
        std::future::pending::<()>().await;
    });
    let options = encrypted(address.await, Authority::new().trusted())
        .with_connect_timeout(Duration::from_millis(200));
    let error = connect(options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("TLS handshake"), "{error}");
}

#[test]
fn certificates_that_are_unusable_are_refused_before_connecting() {
    let with = |ca: Pem| {
        let mut options = options("couchbases://localhost");
        options.tls.ca = Some(ca);
        Connector::new(options).unwrap_err()
    };
    assert_tls_error(&with(Pem::File("/nowhere/ca.pem".into())), "/nowhere/ca.pem");
    assert_tls_error(&with(Pem::Text(b"no PEM".to_vec().into())), "no PEM certificate");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.pem");
    for (text, says) in [
        ("no PEM", "holds no PEM certificate"),
        ("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", "is not PEM"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be used"),
    ] {
        std::fs::write(&file, text).unwrap();
        let said = format!("the CA certificate in {} {says}", file.display());
        assert_tls_error(&with(Pem::File(file.clone())), &said);
    }
    let broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    assert_tls_error(&with(Pem::Text(broken.to_vec().into())), "cannot be used");
}
