//! Grammars compiled beside everything else: on threads of their own, within bounds, once for all who ask
//! for the same.

use super::Source;
use super::progress::{Grammar, first_line, has_no_token};
use super::vocabulary::{Tokens, factory};
use llguidance::api::{GrammarInit, ParserLimits};
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Logger, Matcher, ParserFactory};
use moka::future::Cache;
use remoe_proto::{ErrorCode, ServiceError};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore, oneshot};

/// Compiled grammars that are kept.
const KEPT: u64 = 64;
/// Grammars that are compiled at the same time.
pub(super) const THREADS: usize = 2;
/// Late compilations beside them, which have taken too long: a thread ends only by itself. A further one keeps its
/// turn.
pub(super) const LATE: usize = 4;
/// How long one may take, and how much it may compute to be kept if it took longer. Milliseconds are usual.
pub(super) const TIME: Duration = Duration::from_millis(800);
/// How long a request waits for its turn, and where turns may not come because of those that are late.
const TURN: Duration = Duration::from_secs(10);
const TURN_BESIDE_LATE: Duration = TIME;
/// For so long one that took too much time is not begun again, of so many.
const REFUSED_FOR: Duration = Duration::from_secs(60);
const REFUSED: u64 = 1024;
/// The nice value of threads that are late (setpriority(2)): the least.
const LAST: i32 = 19;
/// The library reads schemas and grammars by recursion; their depth is bounded (`source`, `schema`).
const STACK: usize = 64 << 20;

/// The library's bounds: work while compiling, work for a mask, and what a lexer may come to hold
/// (1 to 2 kB a state).
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 2000,
    initial_lexer_fuel: 500_000,
    step_lexer_fuel: 50_000,
    step_max_items: 20_000,
    max_lexer_states: 16_000,
    max_grammar_size: 500_000,
    precompute_large_lexemes: true,
    verbose_errors: false,
};

/// Ways to read a text that clients' own rules may leave open at any place: all of them are followed with
/// every token, on the engine's thread.
const FOREIGN_ITEMS: usize = 300;

/// Work of a thread: [`compile`].
type CompileFn = dyn Fn(&ParserFactory, &Source) -> Result<Grammar, String> + Send + Sync;

/// Compiles grammars over one vocabulary.
pub(crate) struct Compiler {
    tokens: Arc<dyn Tokens>,
    vocab_size: usize,
    end_ids: Vec<u32>,
    /// Made when the first grammar is asked for.
    pub(super) factory: OnceCell<Arc<ParserFactory>>,
    turns: Arc<Semaphore>,
    late: Arc<Semaphore>,
    kept: Cache<String, Grammar>,
    /// Digests of what took too much time.
    refused: Cache<u64, ()>,
    digests: RandomState,
    pub(super) work: Arc<CompileFn>,
}

/// A compilation on its way.
struct Compilation {
    factory: Arc<ParserFactory>,
    source: Source,
    work: Arc<CompileFn>,
    /// Permit for its turn, or for its room among late compilations.
    place: Arc<Mutex<OwnedSemaphorePermit>>,
}

/// Result of a thread.
struct CompileResult {
    compiled: Result<Grammar, String>,
    /// CPU time that it took.
    computed: Duration,
}

enum CompileOutcome {
    InTime(Result<Grammar, ServiceError>),
    /// It takes too long; what it comes to is still told.
    Late(oneshot::Receiver<CompileResult>),
}

impl Compiler {
    /// Over `vocab_size` tokens, of which `end_ids` end an answer.
    pub(crate) fn new(tokens: Arc<dyn Tokens>, vocab_size: usize, end_ids: Vec<u32>) -> Self {
        Self {
            tokens,
            vocab_size,
            end_ids,
            factory: OnceCell::new(),
            turns: Arc::new(Semaphore::new(THREADS)),
            late: Arc::new(Semaphore::new(LATE)),
            kept: Cache::new(KEPT),
            refused: Cache::builder().max_capacity(REFUSED).time_to_live(REFUSED_FOR).build(),
            digests: RandomState::new(),
            work: Arc::new(compile),
        }
    }

    /// Compiles `source`; `field` is where the request states it.
    ///
    /// # Errors
    /// It is no grammar, nothing matches it, or it is too much: named by `field`. Too many others are being
    /// compiled.
    pub(crate) async fn compile(&self, source: Source, field: &str) -> Result<Grammar, ServiceError> {
        let key = source.key();
        if self.kept.get(&key).await.is_some_and(|grammar| grammar.has_failed()) {
            self.kept.invalidate(&key).await;
        }
        let ends = |token: &str| self.end_ids.iter().any(|&id| names(token, id, &self.tokens.bytes(id)));
        if let Some(token) = source.named_tokens().into_iter().find(|token| ends(token)) {
            let message =
                format!("invalid `{field}`: {token} ends the answer; complete grammars end it themselves");
            return Err(ServiceError::invalid(field, message));
        }
        let compiled = self.kept.try_get_with(key, self.compile_anew(source.clone())).await;
        compiled.map_err(|error| match error.code {
            ErrorCode::InvalidArgument => {
                let (field, message) =
                    source.blamed(&error.message).unwrap_or_else(|| (field.to_owned(), &error.message));
                ServiceError::invalid(&field, format!("`{field}`: {message}"))
            }
            _ => (*error).clone(),
        })
    }

    async fn compile_anew(&self, source: Source) -> Result<Grammar, ServiceError> {
        let key = source.key();
        let digest = self.digests.hash_one(&key);
        if self.refused.contains_key(&digest) {
            return Err(takes_too_long());
        }
        let place = Arc::new(Mutex::new(self.turn().await?));
        let factory = self.factory.get_or_try_init(|| self.open()).await?.clone();
        let compilation = Compilation { factory, source, work: self.work.clone(), place };
        let (late, kept, refused) = (self.late.clone(), self.kept.clone(), self.refused.clone());
        // Goes on if the client has gone: a thread that is late must make room.
        let compiled = tokio::spawn(async move {
            match compilation.run(late).await {
                CompileOutcome::InTime(compiled) => compiled,
                CompileOutcome::Late(done) => {
                    refused.insert(digest, ()).await;
                    tokio::spawn(async move {
                        // What computes for long may do so for every token. Others only had no core.
                        if let Ok(CompileResult { compiled, computed }) = done.await
                            && computed <= TIME
                        {
                            if let Ok(grammar) = compiled {
                                kept.insert(key, grammar).await;
                            }
                            refused.invalidate(&digest).await;
                        }
                    });
                    Err(takes_too_long())
                }
            }
        });
        compiled.await.map_err(|error| internal(&error.to_string()))?
    }

    async fn turn(&self) -> Result<OwnedSemaphorePermit, ServiceError> {
        let wait = if self.late.available_permits() > 0 { TURN } else { TURN_BESIDE_LATE };
        match tokio::time::timeout(wait, self.turns.clone().acquire_owned()).await {
            Ok(Ok(turn)) => Ok(turn),
            _ => Err(ServiceError::new(
                ErrorCode::ResourceExhausted,
                "too many grammars are being compiled; retry later",
            )),
        }
    }

    async fn open(&self) -> Result<Arc<ParserFactory>, ServiceError> {
        let (tokens, vocab_size, end_ids) = (self.tokens.clone(), self.vocab_size, self.end_ids.clone());
        let work = move || factory(tokens.as_ref(), vocab_size, &end_ids);
        let opened = tokio::task::spawn_blocking(work).await.map_err(|error| internal(&error.to_string()))?;
        opened.map(Arc::new).map_err(|message| internal(&message))
    }
}

impl Compilation {
    /// Compiles its source. If that takes too long, gives its turn back, as far as there is room in `late`, and
    /// lowers its thread's priority below all others: a compilation that keeps its turn must be done with it soon.
    async fn run(self, late: Arc<Semaphore>) -> CompileOutcome {
        let (send, mut done) = oneshot::channel();
        let (begin, begun) = oneshot::channel();
        let Self { factory, source, work, place } = self;
        let until_done = place.clone();
        let thread = move || {
            let _gone = begin.send(rustix::thread::gettid());
            let compiled = work(&factory, &source);
            drop(until_done);
            // The client may have given up.
            let _given_up = send.send(CompileResult { compiled, computed: computed() });
        };
        let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK).spawn(thread);
        if let Err(error) = thread {
            return CompileOutcome::InTime(Err(internal(&error.to_string())));
        }
        match tokio::time::timeout(TIME, &mut done).await {
            Ok(Ok(CompileResult { compiled, .. })) => {
                CompileOutcome::InTime(compiled.map_err(|message| ServiceError::invalid("", message)))
            }
            Ok(Err(_panicked)) => CompileOutcome::InTime(Err(internal("the compiler thread panicked"))),
            Err(_late) => {
                if let Ok(room) = late.try_acquire_owned() {
                    *place.lock().unwrap_or_else(PoisonError::into_inner) = room;
                    if let Ok(thread) = begun.await {
                        // Where it is refused, the thread is as it was.
                        let _refused = rustix::process::setpriority_process(Some(thread), LAST);
                    }
                }
                CompileOutcome::Late(done)
            }
        }
    }
}

/// CPU time that this thread has taken; the most where the kernel does not tell.
pub(super) fn computed() -> Duration {
    let counts = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = counts.split_ascii_whitespace().next().and_then(|first| first.parse().ok());
    nanoseconds.map_or(Duration::MAX, Duration::from_nanos)
}

fn takes_too_long() -> ServiceError {
    let message = format!("cannot compile the grammar within {} ms; simplify it", TIME.as_millis());
    ServiceError::invalid("", message)
}

fn internal(message: &str) -> ServiceError {
    ServiceError::new(ErrorCode::Internal, format!("cannot compile grammars: {message}"))
}

/// Compiles `source` and finds its first tokens, which is most of the work of all masks.
fn compile(factory: &ParserFactory, source: &Source) -> Result<Grammar, String> {
    let mut limits = LIMITS;
    if source.has_client_rules() {
        limits.max_items_in_row = FOREIGN_ITEMS;
    }
    let parser = factory.create_parser_from_init_ext(
        GrammarInit::Serialized(source.grammar()),
        Logger::new(0, 0),
        InferenceCapabilities::default(),
        limits,
    );
    let mut beginning = Matcher::new(parser);
    match beginning.compute_mask() {
        Ok(_mask) => Ok(Grammar::new(beginning)),
        Err(error) if has_no_token(&beginning, &error.to_string()) => {
            Err("no answer can match this grammar".to_owned())
        }
        Err(error) => Err(said(&error.to_string())),
    }
}

/// Reports if `named`, in the syntax of rules, may be the token `id` of this text.
fn names(named: &str, id: u32, text: &[u8]) -> bool {
    let Some(list) = named.strip_prefix("<[").and_then(|rest| rest.strip_suffix("]>")) else {
        return named.as_bytes() == text;
    };
    let (is_negated, list) = list.strip_prefix('^').map_or((false, list), |rest| (true, rest));
    let has = list == "*"
        || list.split(',').any(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let bounds = (first.trim().parse::<u32>(), last.trim().parse::<u32>());
            matches!(bounds, (Ok(first), Ok(last)) if (first..=last).contains(&id))
        });
    has != is_negated
}

/// The library's message, in the words of a request; where it names a place in rules, behind that.
fn said(message: &str) -> String {
    if let Some((place, message)) = message.split_once(": failed to compile JSON schema: ") {
        return format!("{}: {}", first_line(place), said(message));
    }
    if message.contains("coerce_one_of") {
        return "unsupported `oneOf`: options must exclude each other by type, or by a constant of a required property"
            .to_owned();
    }
    if message.contains("panic:") {
        return "grammar too complex: cannot combine its constraints".to_owned();
    }
    if let Some((_, parsed)) = message.split_once("regex parse error:") {
        let mut lines = parsed.lines().map(str::trim).filter(|line| !line.is_empty());
        let regex = lines.next().unwrap_or_default();
        let why = lines.find_map(|line| line.strip_prefix("error: ")).unwrap_or("cannot parse it");
        return first_line(&format!("invalid regular expression {}: {why}", short(regex)));
    }
    if let Some((_, regex)) = message.split_once("Unable to determine if regex is empty:") {
        let regex = short(regex.trim());
        return format!("grammar too complex: cannot combine pattern, format and length: {regex}");
    }
    first_line(message)
}

/// The beginning of a text.
pub(super) fn short(text: &str) -> String {
    const CHARACTERS: usize = 150;
    let begun: String = text.chars().take(CHARACTERS).collect();
    let more = if begun.len() < text.len() { ".." } else { "" };
    format!("{begun}{more}")
}
