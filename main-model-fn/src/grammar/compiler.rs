//! Compiles grammars on separate threads, within bounds, and once for all requests with the same grammar.

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

/// Most compiled grammars that are cached.
const MAX_CACHED: u64 = 64;
/// Grammars that are compiled at the same time.
pub(super) const THREADS: usize = 2;
/// Late compilations that may run in addition, because a thread cannot be stopped. A further late compilation keeps its
/// permit.
pub(super) const LATE: usize = 4;
/// Time after which a compilation is late, and CPU time up to which its result is still cached. Milliseconds are usual.
pub(super) const TIME: Duration = Duration::from_millis(800);
/// Longest wait for a permit.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for a permit while all permits are held by late compilations.
const LATE_PERMIT_TIMEOUT: Duration = TIME;
/// Time for which a grammar that took too long is refused.
const REFUSAL_TIME: Duration = Duration::from_secs(60);
/// Most grammars that are refused at a time.
const MAX_REFUSED: u64 = 1024;
/// Nice value of late threads (setpriority(2)): the lowest priority.
const LOWEST_PRIORITY: i32 = 19;
/// Stack of a compiling thread in bytes. The library parses recursively; `source` and `schema` bound the depth.
const STACK_BYTES: usize = 64 << 20;

/// Bounds of the library: work of compiling, work per mask, and states of a lexer (1 to 2 kB each).
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

/// Most items of the parser at one position for clients' own rules. The parser follows all of them with every token, on
/// the engine's thread.
const MAX_CLIENT_ITEMS: usize = 300;

/// Work of a compiling thread: [`compile`].
type CompileFn = dyn Fn(&ParserFactory, &Source) -> Result<Grammar, String> + Send + Sync;

/// Compiles grammars over one vocabulary.
pub(crate) struct Compiler {
    tokens: Arc<dyn Tokens>,
    vocab_size: usize,
    end_ids: Vec<u32>,
    /// Created with the first grammar.
    pub(super) factory: OnceCell<Arc<ParserFactory>>,
    turns: Arc<Semaphore>,
    late: Arc<Semaphore>,
    kept: Cache<String, Grammar>,
    /// Digests of grammars that took too long.
    refused: Cache<u64, ()>,
    digests: RandomState,
    pub(super) work: Arc<CompileFn>,
}

/// A compilation in progress.
struct Compilation {
    factory: Arc<ParserFactory>,
    source: Source,
    work: Arc<CompileFn>,
    /// Permit of a regular or of a late compilation.
    place: Arc<Mutex<OwnedSemaphorePermit>>,
}

/// Result of a compiling thread.
struct CompileResult {
    compiled: Result<Grammar, String>,
    /// CPU time that the compilation took.
    computed: Duration,
}

enum CompileOutcome {
    InTime(Result<Grammar, ServiceError>),
    /// The compilation is late; its result is sent later.
    Late(oneshot::Receiver<CompileResult>),
}

impl Compiler {
    /// Creates a compiler for a vocabulary of `vocab_size` tokens, of which `end_ids` end an answer.
    pub(crate) fn new(tokens: Arc<dyn Tokens>, vocab_size: usize, end_ids: Vec<u32>) -> Self {
        Self {
            tokens,
            vocab_size,
            end_ids,
            factory: OnceCell::new(),
            turns: Arc::new(Semaphore::new(THREADS)),
            late: Arc::new(Semaphore::new(LATE)),
            kept: Cache::new(MAX_CACHED),
            refused: Cache::builder().max_capacity(MAX_REFUSED).time_to_live(REFUSAL_TIME).build(),
            digests: RandomState::new(),
            work: Arc::new(compile),
        }
    }

    /// Compiles `source`, or returns the cached grammar. `field` is the request field with the source.
    ///
    /// # Errors
    /// Fails with an error of `field` if the grammar is invalid, matches nothing or exceeds the limits. Fails if too many other
    /// grammars are being compiled.
    pub(crate) async fn compile(&self, source: Source, field: &str) -> Result<Grammar, ServiceError> {
        let key = source.cache_key();
        if self.kept.get(&key).await.is_some_and(|grammar| grammar.has_failed()) {
            self.kept.invalidate(&key).await;
        }
        let ends = |token: &str| self.end_ids.iter().any(|&id| names(token, id, &self.tokens.bytes(id)));
        if let Some(token) = source.named_tokens().into_iter().find(|token| ends(token)) {
            let message =
                format!("invalid `{field}`: {token} ends the answer; complete grammars end it themselves");
            return Err(ServiceError::invalid(field, message));
        }
        let compiled = self.kept.try_get_with(key, self.compile_uncached(source.clone())).await;
        compiled.map_err(|error| match error.code {
            ErrorCode::InvalidArgument => {
                let (field, message) =
                    source.blamed(&error.message).unwrap_or_else(|| (field.to_owned(), &error.message));
                ServiceError::invalid(&field, format!("`{field}`: {message}"))
            }
            _ => (*error).clone(),
        })
    }

    async fn compile_uncached(&self, source: Source) -> Result<Grammar, ServiceError> {
        let key = source.cache_key();
        let digest = self.digests.hash_one(&key);
        if self.refused.contains_key(&digest) {
            return Err(takes_too_long());
        }
        let place = Arc::new(Mutex::new(self.acquire_permit().await?));
        let factory = self.factory.get_or_try_init(|| self.open()).await?.clone();
        let compilation = Compilation { factory, source, work: self.work.clone(), place };
        let (late, kept, refused) = (self.late.clone(), self.kept.clone(), self.refused.clone());
        // Continues if the client is gone, because a late thread must release its permit.
        let compiled = tokio::spawn(async move {
            match compilation.run(late).await {
                CompileOutcome::InTime(compiled) => compiled,
                CompileOutcome::Late(done) => {
                    refused.insert(digest, ()).await;
                    tokio::spawn(async move {
                        // A grammar with much CPU time may be as slow for every token; others only lacked a core.
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

    async fn acquire_permit(&self) -> Result<OwnedSemaphorePermit, ServiceError> {
        let wait = if self.late.available_permits() > 0 { PERMIT_TIMEOUT } else { LATE_PERMIT_TIMEOUT };
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
    /// Runs the compilation. If it is late, moves it to the permits of `late`, if one is free, and lowers its thread's priority,
    /// so that a regular compilation gets the permit.
    async fn run(self, late: Arc<Semaphore>) -> CompileOutcome {
        let (send, mut done) = oneshot::channel();
        let (begin, begun) = oneshot::channel();
        let Self { factory, source, work, place } = self;
        let until_done = place.clone();
        let thread = move || {
            let _gone = begin.send(rustix::thread::gettid());
            let compiled = work(&factory, &source);
            drop(until_done);
            // The client may be gone.
            let _given_up = send.send(CompileResult { compiled, computed: computed() });
        };
        let thread =
            std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES).spawn(thread);
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
                        // If the kernel refuses, the priority stays.
                        let _refused = rustix::process::setpriority_process(Some(thread), LOWEST_PRIORITY);
                    }
                }
                CompileOutcome::Late(done)
            }
        }
    }
}

/// Returns the CPU time of this thread; the largest duration if the kernel does not report it.
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

/// Compiles `source`, and computes the first mask, which is most of the work of all masks.
fn compile(factory: &ParserFactory, source: &Source) -> Result<Grammar, String> {
    let mut limits = LIMITS;
    if source.has_client_rules() {
        limits.max_items_in_row = MAX_CLIENT_ITEMS;
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
        Err(error) => Err(translate_message(&error.to_string())),
    }
}

/// Reports if `named`, a token in the syntax of rules, may be the token `id` with this text.
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

/// Translates a message of the library to the terms of a request. Keeps the position in the rules, if it has one.
fn translate_message(message: &str) -> String {
    if let Some((place, message)) = message.split_once(": failed to compile JSON schema: ") {
        return format!("{}: {}", first_line(place), translate_message(message));
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

/// Returns the beginning of a text, for messages.
pub(super) fn short(text: &str) -> String {
    const CHARACTERS: usize = 150;
    let begun: String = text.chars().take(CHARACTERS).collect();
    let more = if begun.len() < text.len() { ".." } else { "" };
    format!("{begun}{more}")
}
