//! Listening for clients, who may come all at once.

use std::io;
use std::net::SocketAddr;
use tokio::net::{TcpListener, TcpSocket};

/// Connections that wait to be accepted, at most; the kernel may allow fewer (`net.core.somaxconn`). Of those beyond it does not
/// hear: their clients knock again after a second. [`TcpListener::bind`] has 128.
const BACKLOG: u32 = 1024;

/// A listener at `address`, also where connections of one that has ended are still being closed.
///
/// # Errors
/// The address is taken, or not ours.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use futures_util::future::join_all;
    use std::time::Duration;
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    /// More connections than a listener has room for by default, before the first is accepted.
    #[tokio::test]
    async fn who_comes_in_a_burst_need_not_knock_again() {
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
        let burst = most.trim().parse().unwrap_or(usize::MAX).min(400);
        let connecting = join_all((0..burst).map(|_| TcpStream::connect(address)));
        let connected = timeout(Duration::from_secs(30), connecting).await.unwrap();
        assert!(connected.iter().all(Result::is_ok));
    }
}
