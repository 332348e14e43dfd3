//! Refusals of a certificate by the other end.

use rustls::{AlertDescription, Error as TlsError};
use std::error::Error;
use std::io;

/// Reports if `error`, or one of its causes, is that the other end does not accept the certificate that was shown to
/// it. With TLS 1.3 the alert arrives after the handshake is over here, in place of an answer; by then the other end
/// has read nothing of what was sent.
#[must_use]
pub fn is_refusal(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref().is_some_and(is_about_certificates) {
            return true;
        }
        // `source` of an I/O error skips the error that it was made of.
        let within = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause = within.map(|within| within as &(dyn Error + 'static)).or_else(|| error.source());
    }
    false
}

fn is_about_certificates(error: &TlsError) -> bool {
    use AlertDescription as Alert;
    matches!(
        error,
        TlsError::AlertReceived(
            Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::UnknownCA
                | Alert::AccessDenied
                | Alert::CertificateRequired
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_said_of_certificates_is_a_refusal() {
        let heard = |alert| io::Error::other(TlsError::AlertReceived(alert));
        assert!(is_refusal(&heard(AlertDescription::CertificateExpired)));
        assert!(
            is_refusal(&io::Error::other(heard(AlertDescription::UnknownCA))),
            "as the cause of another error"
        );
        for other in [heard(AlertDescription::BadRecordMac), io::ErrorKind::ConnectionReset.into()] {
            assert!(!is_refusal(&other), "{other}");
        }
    }
}
