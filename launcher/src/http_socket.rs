//! The socket at which users reach a deployment, held beside its main function.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::net::TcpSocket;

/// Connections that wait while no main function accepts them, at most; the kernel may allow fewer
/// (`net.core.somaxconn`). Further ones are tried again by the kernel of their client.
const BACKLOG: u32 = 1024;

/// A listening socket that main functions inherit, one after the other. While none lives, connections
/// wait in its backlog instead of being refused.
#[derive(Debug)]
pub struct HttpSocket {
    address: SocketAddr,
    listener: Mutex<Option<TcpListener>>,
}

impl HttpSocket {
    /// Listens on `address`; port 0 takes any free one. Call it within a tokio runtime.
    ///
    /// # Errors
    /// The address is taken or not ours.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // Connections of a deployment that has ended keep nobody from the port.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        let listener = socket.listen(BACKLOG)?.into_std()?;
        Ok(Self { address: listener.local_addr()?, listener: Mutex::new(Some(listener)) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Leaves the socket to the main function that has it: when that ends, or where there is none,
    /// connections are refused.
    pub fn close(&self) {
        self.listener().take();
    }

    /// The socket as the standard input of a main function.
    ///
    /// # Errors
    /// The socket is closed, or this process has too many open files.
    pub(crate) fn for_child(&self) -> io::Result<Stdio> {
        match self.listener().as_ref() {
            Some(listener) => Ok(Stdio::from(OwnedFd::from(listener.try_clone()?))),
            None => Err(io::Error::other("the socket for HTTP is closed")),
        }
    }

    fn listener(&self) -> MutexGuard<'_, Option<TcpListener>> {
        // It is set and taken as a whole.
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
