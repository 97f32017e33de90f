//! Who may take part: whoever holds a secret.
//!
//! Both sides of a connection show one Ed25519 key, which follows from the secret, as a raw public key (RFC 7250), and
//! TLS 1.3 has each prove that it holds it. So there is no certificate to hand out or to renew, and the secret never goes
//! over the network.

use std::sync::Arc;

use forebay_core::{Error, Result};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme,
};

/// What the key's derivation is for, as BLAKE3 asks for it; another one would be another key.
const PURPOSE: &str = "forebay 2026-11-28 key of hosts that hold one secret";
/// What precedes the 32 bytes of an Ed25519 key in PKCS #8 (RFC 8410, 7).
const PKCS8: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
/// A secret shorter than this can be found by trying.
const LEAST_SECRET: usize = 16;

/// The two sides of a handshake among those who hold a secret and mean one thing by it.
#[derive(Debug, Clone)]
pub struct Identity {
    pub(super) server: Arc<ServerConfig>,
    pub(super) client: Arc<ClientConfig>,
}

impl Identity {
    /// Of whoever holds `secret`, for one `scope` (others cannot be told from strangers), speaking `protocol` (ALPN).
    ///
    /// # Errors
    /// `Invalid` for a secret of fewer than 16 bytes.
    pub fn new(secret: &[u8], scope: &[u8], protocol: &str) -> Result<Self> {
        if secret.len() < LEAST_SECRET {
            let message = format!("a secret of {} bytes can be guessed", secret.len());
            return Err(
                Error::invalid(message).with_hint("head -c 32 /dev/urandom | base64 makes a good one")
            );
        }
        let length = (secret.len() as u64).to_le_bytes();
        let seed = blake3::derive_key(PURPOSE, &[&length, secret, scope].concat());
        let provider = Arc::new(aws_lc_rs::default_provider());
        let refused = |error: rustls::Error| Error::bug("the key of a secret").with_source(error);
        let key = aws_lc_rs::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from([&PKCS8[..], &seed].concat()));
        let key = key.map_err(refused)?;
        let public = key.public_key().ok_or_else(|| Error::bug("a key without a public one"))?;
        let public = CertificateDer::from(public.to_vec());
        let own = Arc::new(CertifiedKey::new(vec![public.clone()], key));
        let same = Arc::new(Same { public, provider: provider.clone() });
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(refused)?
            .with_client_cert_verifier(same.clone())
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own.clone())));
        // What was agreed on once is not taken up again: a handshake costs a host little, and each is proof.
        server.send_tls13_tickets = 0;
        server.alpn_protocols = vec![protocol.into()];
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(refused)?
            .dangerous()
            .with_custom_certificate_verifier(same)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(own)));
        client.resumption = Resumption::disabled();
        client.alpn_protocols = vec![protocol.into()];
        Ok(Self { server: Arc::new(server), client: Arc::new(client) })
    }
}

/// Takes whoever shows the key that this side has, and proves to hold it.
#[derive(Debug)]
struct Same {
    public: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl Same {
    fn check(&self, shown: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        match *shown == self.public {
            true => Ok(()),
            false => Err(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)),
        }
    }

    fn check_proof(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        proof: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let public = SubjectPublicKeyInfoDer::from(shown.as_ref());
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &public, proof, algorithms)
    }
}

/// TLS 1.2 is not offered.
fn never<T>() -> Result<T, rustls::Error> {
    Err(rustls::PeerIncompatible::Tls12NotOfferedOrEnabled.into())
}

impl ServerCertVerifier for Same {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(shown).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        never()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        proof: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_proof(message, shown, proof)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Same {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(shown).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        never()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        proof: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_proof(message, shown, proof)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
