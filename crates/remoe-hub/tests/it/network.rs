//! Network namespace for one test: addresses on its loopback device, servers on them, and a DNS server.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Environment variable of the process inside the namespaces.
const INSIDE_VARIABLE: &str = "REMOE_TEST_INSIDE_NETWORK";
/// Time limit of the process, in seconds.
const TIME_LIMIT_SECONDS: &str = "300";

/// Runs `test` in its own network, mount and process namespaces. `name` is the full name of the calling test.
///
/// # Panics
/// The test fails, or the namespaces cannot be created. They require root or unprivileged user namespaces.
pub(crate) fn run_in_namespaces(name: &str, test: impl AsyncFnOnce()) {
    if std::env::var_os(INSIDE_VARIABLE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        return runtime.block_on(test());
    }
    let mut command = Command::new("timeout");
    command.args([
        TIME_LIMIT_SECONDS,
        "unshare",
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]);
    if !rustix::process::geteuid().is_root() {
        command.arg("--map-root-user");
    }
    command
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE_VARIABLE, "1");
    let output = command.output().unwrap();
    let output_text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(
        output.status.success() && output_text.contains("1 passed"),
        "{name} failed in its namespaces ({}), which take root, or users that may make namespaces:\n{output_text}",
        output.status
    );
}

/// Runs a shell script.
fn shell(script: &str) {
    let output = Command::new("bash").args(["-euc", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

#[derive(Default)]
struct NetworkState {
    /// Connections to each counting server.
    connections: BTreeMap<IpAddr, usize>,
    /// Target of the redirecting server.
    target: String,
    /// Addresses of DNS answers by name. Each query removes the first one, except the last.
    names: BTreeMap<String, VecDeque<IpAddr>>,
    /// Number of answered DNS queries by name.
    queries: BTreeMap<String, usize>,
}

/// Network of this process, with its servers.
pub(crate) struct Network {
    state: Arc<Mutex<NetworkState>>,
}

impl Network {
    /// Adds `addresses` to the loopback device, and starts a DNS server.
    pub(crate) fn new(addresses: &[&str]) -> Self {
        let mut script = "ip link set lo up\n".to_owned();
        for address in addresses {
            let options = if address.contains(':') { "/128 dev lo nodad" } else { "/32 dev lo" };
            writeln!(script, "ip address add {address}{options}").unwrap();
        }
        // Makes the resolver use only the hosts file and the DNS server.
        script += "folder=$(mktemp --directory)
            mount -t tmpfs tmpfs $folder
            printf 'nameserver 127.0.0.1\\noptions timeout:2 attempts:2\\n' > $folder/resolv.conf
            printf 'hosts: files dns\\n' > $folder/nsswitch.conf
            for file in resolv.conf nsswitch.conf; do
                if test -e /etc/$file; then mount --bind $folder/$file /etc/$file; fi
            done";
        shell(&script);
        let network = Self { state: Arc::default() };
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 53)).unwrap();
        let state = Arc::clone(&network.state);
        thread::spawn(move || {
            let mut query = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut query) {
                if let Some(answer) = state.lock().unwrap().answer(&query[..length]) {
                    socket.send_to(&answer, from).unwrap();
                }
            }
        });
        network
    }

    /// Starts a server that counts its connections.
    pub(crate) fn add_counting_server(&mut self, listen: SocketAddr) {
        let state = Arc::clone(&self.state);
        serve(listen, move |stream| {
            *state.lock().unwrap().connections.entry(listen.ip()).or_default() += 1;
            respond(stream, "404 Not Found", "");
        });
    }

    /// Starts a server that redirects all requests.
    pub(crate) fn add_redirecting_server(&mut self, listen: SocketAddr) {
        let state = Arc::clone(&self.state);
        serve(listen, move |stream| {
            let target = state.lock().unwrap().target.clone();
            respond(stream, "302 Found", &target);
        });
    }

    /// Starts a server that closes all connections.
    pub(crate) fn add_closing_server(&mut self, listen: SocketAddr) {
        serve(listen, drop);
    }

    /// Sets the target of the redirecting server. It appends the requested file's name to `url`.
    pub(crate) fn set_redirect_target(&mut self, url: &str) {
        url.clone_into(&mut self.state.lock().unwrap().target);
    }

    /// Sets the addresses with which DNS answers queries for `name`, in order.
    pub(crate) fn set_dns(&mut self, name: &str, addresses: &[&str]) {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        self.state.lock().unwrap().names.insert(name.to_owned(), addresses);
    }

    /// Returns the number of connections to the counting server at `address`.
    pub(crate) fn connections(&self, address: &str) -> usize {
        self.state.lock().unwrap().connections.get(&address.parse::<IpAddr>().unwrap()).copied().unwrap_or(0)
    }

    /// Returns the number of DNS queries for `name`.
    pub(crate) fn dns_queries(&self, name: &str) -> usize {
        self.state.lock().unwrap().queries.get(name).copied().unwrap_or(0)
    }
}

fn serve(listen: SocketAddr, on_connection: impl Fn(TcpStream) + Send + 'static) {
    let listener = TcpListener::bind(listen).unwrap();
    thread::spawn(move || listener.incoming().flatten().for_each(on_connection));
}

/// Reads a request's head and responds. With a `target`, redirects to it and the last segment of the path.
fn respond(mut stream: TcpStream, status: &str, target: &str) {
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let (mut head, mut part) = (Vec::new(), [0; 1024]);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut part) {
            Ok(0) | Err(_) => return,
            Ok(length) => head.extend_from_slice(&part[..length]),
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split(' ').nth(1).unwrap_or_default();
    let file = path.rsplit('/').next().unwrap_or_default();
    let location = if target.is_empty() { String::new() } else { format!("Location: {target}/{file}\r\n") };
    let answer = format!("HTTP/1.1 {status}\r\n{location}Content-Length: 0\r\nConnection: close\r\n\r\n");
    // The client may have closed the connection.
    let _gone = stream.write_all(answer.as_bytes());
}

impl NetworkState {
    /// Encodes the answer to a DNS query (RFC 1035): one address, or none.
    fn answer(&mut self, query: &[u8]) -> Option<Vec<u8>> {
        let (mut offset, mut labels) = (12, Vec::new());
        loop {
            let length = usize::from(*query.get(offset)?);
            offset += 1;
            if length == 0 {
                break;
            }
            labels.push(String::from_utf8_lossy(query.get(offset..offset + length)?).to_lowercase());
            offset += length;
        }
        let name = labels.join(".");
        let record_type = query.get(offset..offset + 2)?;
        let question = query.get(12..offset + 4)?;
        let (is_v4, is_v6) = (record_type == [0, 1], record_type == [0, 28]);
        let addresses = self.names.get_mut(&name);
        let exists = addresses.is_some();
        let mut found = None;
        if let Some(addresses) = addresses {
            let next = addresses.front().copied()?;
            if (is_v4 && next.is_ipv4()) || (is_v6 && next.is_ipv6()) {
                found = Some(next);
                *self.queries.entry(name).or_default() += 1;
                if addresses.len() > 1 {
                    addresses.pop_front();
                }
            }
        }
        let mut answer = query.get(..2)?.to_vec();
        // Flags: an authoritative response, with NXDOMAIN for names that do not exist.
        answer.extend([
            0x81,
            if exists { 0x80 } else { 0x83 },
            0,
            1,
            0,
            u8::from(found.is_some()),
            0,
            0,
            0,
            0,
        ]);
        answer.extend(question);
        if let Some(address) = found {
            let bytes = match address {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            // A pointer to the name of the query, its type and class, and a time to live of 0.
            answer.extend([0xc0, 12]);
            answer.extend(record_type);
            answer.extend([0, 1, 0, 0, 0, 0, 0, bytes.len() as u8]);
            answer.extend(bytes);
        }
        Some(answer)
    }
}
