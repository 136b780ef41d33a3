//! TLS without C: rustls with Graviola's cryptography, where the processor has its instructions.

use ureq::tls::TlsConfig;

/// Variables that name a file of certificates to trust: those of OpenSSL, requests and curl.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const BUNDLES: [&str; 3] = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];

/// Instructions that Graviola needs, if this processor lacks one.
pub(crate) fn missing_instructions() -> Option<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let has_all = std::arch::is_x86_feature_detected!("adx")
            && std::arch::is_x86_feature_detected!("aes")
            && std::arch::is_x86_feature_detected!("avx")
            && std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("bmi1")
            && std::arch::is_x86_feature_detected!("bmi2")
            && std::arch::is_x86_feature_detected!("pclmulqdq");
        (!has_all).then_some("ADX, AES, AVX2, BMI2 and PCLMULQDQ")
    }
    #[cfg(target_arch = "aarch64")]
    {
        let has_all = std::arch::is_aarch64_feature_detected!("neon")
            && std::arch::is_aarch64_feature_detected!("aes")
            && std::arch::is_aarch64_feature_detected!("pmull")
            && std::arch::is_aarch64_feature_detected!("sha2");
        (!has_all).then_some("AES, PMULL and SHA-2 of ARMv8")
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        Some("those of x86-64 or AArch64")
    }
}

/// Configuration of the client: Mozilla's certificates, or those of a file that the environment
/// names.
///
/// # Errors
/// That file holds no certificates.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn config() -> Result<TlsConfig, crate::error::HubError> {
    use std::sync::Arc;

    use ureq::tls::{PemItem, RootCerts, TlsProvider, parse_pem};

    let named = BUNDLES.iter().find_map(|&variable| {
        let path = std::env::var_os(variable).filter(|path| !path.is_empty())?;
        Some((variable, std::path::PathBuf::from(path)))
    });
    let roots = match named {
        None => RootCerts::WebPki,
        Some((variable, path)) => {
            let certificate = |item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            };
            let pem = std::fs::read(&path).unwrap_or_default();
            let certificates: Vec<_> = parse_pem(&pem).filter_map(certificate).collect();
            if certificates.is_empty() {
                return Err(crate::error::HubError::Setting {
                    variable,
                    value: path.display().to_string(),
                    problem: "the file holds no certificates in PEM",
                });
            }
            RootCerts::new_with_certs(&certificates)
        }
    };
    let provider = Arc::new(rustls_graviola::default_provider());
    Ok(TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .root_certs(roots)
        .unversioned_rustls_crypto_provider(provider)
        .build())
}

/// Configuration of a client that reaches plain HTTP only.
///
/// # Errors
/// None.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) fn config() -> Result<TlsConfig, crate::error::HubError> {
    Ok(TlsConfig::default())
}
