//! Creates listening sockets.

use rustix::io::Errno;
use rustix::net::sockopt::set_ipv6_v6only;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use tokio::net::{TcpListener, TcpSocket};

/// Maximum number of connections that wait to be accepted; the kernel may allow fewer (`net.core.somaxconn`). The
/// kernel drops further connections, and their clients retry after a second. [`TcpListener::bind`] uses 128.
const BACKLOG: u32 = 1024;

/// Listens on `address`. `[::]` is every address of the machine, including IPv4, whatever the machine's setting, so
/// that pods are the same in IPv4 and IPv6 clusters. Without IPv6 it is every IPv4 address.
///
/// # Errors
/// The address is in use or not local; the message names it.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = match bind(address) {
        Err(error) if is_wildcard(address) && lacks_ipv6(&error) => {
            bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port())))
        }
        outcome => outcome,
    };
    listener.map_err(|error| io::Error::new(error.kind(), format!("cannot listen on {address}: {error}")))
}

fn is_wildcard(address: SocketAddr) -> bool {
    address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
}

/// Binds to `address`, even if connections of an earlier listener are still closing.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if is_wildcard(address) {
        set_ipv6_v6only(&socket, false)?;
    }
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Returns whether the kernel, or the network of the pod, lacks IPv6.
fn lacks_ipv6(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::net::TcpStream;
    use tokio::task::JoinSet;
    use tokio::time::timeout;

    /// More connections than the default backlog, before the first is accepted.
    #[tokio::test]
    async fn who_comes_in_a_burst_need_not_knock_again() {
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
        let burst = most.trim().parse().unwrap_or(usize::MAX).min(400);
        let connecting: JoinSet<_> = (0..burst).map(|_| TcpStream::connect(address)).collect();
        let connected = timeout(Duration::from_secs(30), connecting.join_all()).await.unwrap();
        assert!(connected.iter().all(Result::is_ok));
    }

    #[tokio::test]
    async fn everywhere_is_both_versions_of_ip() {
        let listener = listen("[::]:0".parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        for ip in ["127.0.0.1", "::1"] {
            let ip: IpAddr = ip.parse().unwrap();
            // Machines without IPv6 have no such address.
            if ip.is_ipv6() && TcpListener::bind((ip, 0)).await.is_err() {
                continue;
            }
            let connected = TcpStream::connect((ip, port)).await.unwrap();
            let (_accepted, peer) = listener.accept().await.unwrap();
            assert_eq!(peer.ip().to_canonical(), ip);
            drop(connected);
        }
    }

    #[tokio::test]
    async fn one_address_is_that_one() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(address.is_ipv4());
        let error = listen(address).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }

    #[test]
    fn only_what_says_that_there_is_no_ipv6_falls_back() {
        let of = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(lacks_ipv6(&of(Errno::AFNOSUPPORT)) && lacks_ipv6(&of(Errno::ADDRNOTAVAIL)));
        assert!(!lacks_ipv6(&of(Errno::ADDRINUSE)) && !lacks_ipv6(&io::Error::other("no errno")));
    }
}
