use rustix::net::sockopt::socket_acceptconn;
use rustix::stdio::dup2_stdin;
use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;

/// Takes the listening socket that is this process's standard input, as a launcher leaves it there that
/// keeps the socket itself over restarts (inetd's `wait`). Standard input is `/dev/null` from then on, so
/// that nothing but the listener holds the socket here.
///
/// # Errors
/// Standard input is no listening TCP socket.
pub fn inherited_listener() -> io::Result<TcpListener> {
    let input = io::stdin();
    let refused = |error: io::Error| {
        io::Error::new(error.kind(), format!("standard input is no listening socket: {error}"))
    };
    if !socket_acceptconn(input.as_fd()).map_err(|error| refused(error.into()))? {
        return Err(refused(io::Error::new(io::ErrorKind::InvalidInput, "it does not listen")));
    }
    let listener = TcpListener::from(input.as_fd().try_clone_to_owned()?);
    listener.local_addr().map_err(refused)?;
    dup2_stdin(File::open("/dev/null")?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
