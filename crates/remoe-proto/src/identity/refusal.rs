//! Detection of certificates that the other end rejects.

use rustls::{AlertDescription, Error as TlsError};
use std::error::Error;
use std::io;

/// Returns true if `error` or one of its causes is a rejection of the own certificate by the other end. In TLS 1.3
/// this alert arrives after the handshake has completed at this end, in place of an answer. The other end has not
/// read any data then.
#[must_use]
pub fn is_refusal(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref().is_some_and(is_certificate_alert) {
            return true;
        }
        // `source` of an I/O error skips the error that it wraps.
        let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause = wrapped.map(|wrapped| wrapped as &(dyn Error + 'static)).or_else(|| error.source());
    }
    false
}

fn is_certificate_alert(error: &TlsError) -> bool {
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
    fn only_certificate_alerts_are_refusals() {
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
