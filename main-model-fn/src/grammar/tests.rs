//! Tests of grammars over a vocabulary of bytes.

use super::compiler::{LATE, THREADS, TIME, computed};
use super::{Compiler, Grammar, GrammarError, Source, Tokens, Whitespace};
use remoe_proto::{ErrorCode, ServiceError};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Shorter than the period for which a grammar stays refused.
const LONG: Duration = Duration::from_secs(50);

/// Token that ends an answer.
pub(crate) const END: u32 = 256;

/// Tokenizer whose tokens 0 to 255 are bytes.
struct ByteTokenizer;

impl Tokens for ByteTokenizer {
    fn bytes(&self, id: u32) -> Vec<u8> {
        u8::try_from(id).map_or_else(|_| b"<end>".to_vec(), |byte| vec![byte])
    }

    fn is_special(&self, id: u32) -> bool {
        id >= END
    }
}

pub(super) fn compiler() -> Compiler {
    Compiler::new(Arc::new(ByteTokenizer), 257, vec![END])
}

async fn compile(compiler: &Compiler, source: Result<Source, String>) -> Result<Grammar, ServiceError> {
    compiler.compile(source.map_err(|message| ServiceError::invalid("f", message))?, "f").await
}

fn schema(schema: Value) -> Result<Source, String> {
    Source::json(Some(schema), Whitespace::default())
}

/// Reports if `text` is a complete answer.
pub(crate) fn accepts(grammar: &Grammar, text: &str) -> bool {
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    accepts_tokens(grammar, &tokens)
}

/// Reports if `tokens` are a complete answer.
pub(crate) fn accepts_tokens(grammar: &Grammar, tokens: &[u32]) -> bool {
    let mut progress = grammar.begin();
    for (index, &token) in tokens.iter().enumerate() {
        if !progress.mask().unwrap().allows(token) {
            return false;
        }
        if progress.step(token).unwrap() {
            return index + 1 == tokens.len();
        }
    }
    progress.mask().unwrap().allows(END)
}

/// Keywords of the suite with the number of refused groups, and of valid instances that the grammar does not allow.
const KNOWN_GAPS: [(&str, usize, usize); 27] = [
    // `false` allows no answer.
    ("boolean_schema", 1, 0),
    ("anyOf", 1, 0),
    ("allOf", 2, 2),
    ("enum", 1, 4),
    // Properties must be in the order of the schema, and integers have no decimal point.
    ("const", 0, 5),
    ("type", 0, 1),
    // Alternatives that overlap.
    ("oneOf", 9, 0),
    // Patterns that overlap.
    ("patternProperties", 3, 0),
    // Combined with refused keywords.
    ("additionalProperties", 2, 0),
    ("multipleOf", 1, 0),
    // Other documents, anchors.
    ("ref", 18, 0),
    ("maxItems", 0, 0),
    ("minItems", 0, 0),
    ("maxLength", 0, 0),
    ("minLength", 0, 0),
    ("maxProperties", 0, 0),
    ("minProperties", 0, 0),
    ("maximum", 0, 0),
    ("minimum", 0, 0),
    ("exclusiveMaximum", 0, 0),
    ("exclusiveMinimum", 0, 0),
    ("items", 0, 0),
    ("prefixItems", 0, 0),
    ("pattern", 0, 0),
    ("properties", 0, 0),
    ("required", 0, 0),
    ("infinite-loop-detection", 0, 0),
];

/// Keywords that are always refused.
const REFUSED_KEYWORDS: [&str; 7] = [
    "contains",
    "dependentRequired",
    "if-then-else",
    "not",
    "propertyNames",
    "uniqueItems",
    "dependentSchemas",
];

/// In the official test suite, no invalid instance is allowed as an answer.
#[tokio::test]
async fn invalid_instances_are_no_answers() {
    let compiler = compiler();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/json_schema_suite");
    let mut gaps = BTreeMap::new();
    for (keyword, ..) in KNOWN_GAPS {
        let file = std::fs::read(folder.join(format!("{keyword}.json"))).unwrap();
        let groups: Value = serde_json::from_slice(&file).unwrap();
        let (mut refused, mut not_allowed) = (0, 0);
        for group in groups.as_array().unwrap() {
            let grammar = match compile(&compiler, schema(group["schema"].clone())).await {
                Ok(grammar) => grammar,
                Err(error) => {
                    assert_eq!(error.code, ErrorCode::InvalidArgument, "{error}");
                    refused += 1;
                    continue;
                }
            };
            for test in group["tests"].as_array().unwrap() {
                let text = test["data"].to_string();
                match (accepts(&grammar, &text), test["valid"].as_bool().unwrap()) {
                    (true, false) => panic!("{keyword}: {}: {text} is an answer", group["description"]),
                    (false, true) => not_allowed += 1,
                    _ => (),
                }
            }
        }
        gaps.insert(keyword, (refused, not_allowed));
    }
    let known_gaps: BTreeMap<_, _> =
        KNOWN_GAPS.iter().map(|&(keyword, refused, not_allowed)| (keyword, (refused, not_allowed))).collect();
    assert_eq!(gaps, known_gaps);
}

#[tokio::test]
async fn unsupported_keywords_are_named_with_their_pointer() {
    for keyword in REFUSED_KEYWORDS.iter().flat_map(|keyword| keyword.split('-')) {
        let refused = schema(json!({"properties": {"a/b": {"items": {keyword: {"type": "string"}}}}}));
        let message = refused.unwrap_err();
        assert!(
            message.contains(&format!("`{keyword}`")) && message.contains("/properties/a~1b/items"),
            "{message}"
        );
    }
    for (refused, word) in [
        (json!({"x-guidance": {"lenient": true}}), "x-guidance"),
        (json!({"$ref": "https://example.com/schema"}), "$ref"),
        (json!({"$ref": "#/components/a", "components": {"a": {"not": {}}}}), "$ref"),
        (json!({"const": 9_007_199_254_740_993_i64}), "2^53"),
        (json!({"minProperties": 2}), "minProperties"),
        (json!({"maxItems": 1_000_000}), "maxItems"),
        (json!({"multipleOf": 99_991}), "multipleOf"),
        (json!({"properties": {"a": {"minimum": 1.23e-300}}}), "/properties/a: unsupported `minimum`"),
        (json!({"exclusiveMaximum": -1e-60}), "exclusiveMaximum"),
        (json!({"items": {"pattern": "^(?=a)b"}}), "/items: invalid `pattern` ^(?=a)b: look-around"),
        (json!({"patternProperties": {"^a{,3}$": {}}}), "`patternProperties` ^a{,3}$: repetition"),
        (json!({"items": 3}), "boolean"),
    ] {
        let message = schema(refused).unwrap_err();
        assert!(message.contains(word), "{message}");
    }
    // Disjoint alternatives and small common multiples are accepted.
    let apart = json!({"properties": {"a": {"multipleOf": 997}, "b": {"multipleOf": 991}}});
    compile(&compiler(), schema(apart)).await.unwrap();
    let small = json!({"allOf": [{"type": "number", "multipleOf": 0.25}, {"multipleOf": 1.5}]});
    let small = compile(&compiler(), schema(small)).await.unwrap();
    assert!(accepts(&small, "4.5") && !accepts(&small, "0.5"));
    // Property names, values and annotations are no keywords.
    let free = json!({
        "properties": {"not": {"default": {"not": 1}}}, "title": "t", "discriminator": {"propertyName": "x"},
        "enum": [{"not": 1}], "uniqueItems": false, "examples": [{"if": 1}],
    });
    compile(&compiler(), schema(free)).await.unwrap();
}

/// Schemas that no finite value satisfies are refused; as one of several alternatives they are never begun.
#[tokio::test]
async fn schemas_without_finite_values_are_refused() {
    let node = |needed: Value| json!({"type": "object", "properties": {"n": needed}, "required": ["n"]});
    let list = |item: Value| json!({"type": "array", "items": item, "minItems": 1});
    let this = || json!({"$ref": "#"});
    let with = |schema: Value| {
        let mut schema = schema;
        schema["$defs"] = json!({"c": {"$ref": "#/$defs/c"}, "d": node(json!({"$ref": "#/$defs/d"}))});
        schema
    };
    for (refused, place) in [
        (with(json!({"$ref": "#/$defs/c"})), ""),
        (with(json!({"anyOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}]})), "/anyOf/0"),
        (node(this()), "/properties/n"),
        (list(this()), "/items"),
        (json!({"type": "array", "prefixItems": [true, node(this())], "minItems": 2}), "/prefixItems/1"),
        (json!({"type": "array", "items": [this()], "minItems": 1}), "/items/0"),
        (
            json!({"type": "object", "required": ["a"], "additionalProperties": this()}),
            "/additionalProperties",
        ),
        (
            json!({"type": "object", "minProperties": 1, "additionalProperties": this()}),
            "/additionalProperties",
        ),
        (node(json!({"allOf": [{"type": "object"}, this()]})), "/properties/n/allOf/1"),
    ] {
        let message = schema(refused.clone()).unwrap_err();
        assert!(message.contains("requires itself") && message.contains(place), "{refused}: {message}");
    }
    let compiler = compiler();
    let null = || json!({"anyOf": [this(), {"type": "null"}]});
    for (taken, text, not) in [
        (json!({"type": "object", "properties": {"n": this()}}), "{\"n\": {\"n\": {}}}", "{\"n\": 1}"),
        (json!({"type": "array", "items": this()}), "[[], [[]]]", "[1]"),
        (json!({"type": "array", "items": this(), "minItems": 0}), "[[]]", "[1]"),
        (json!({"type": ["array", "null"], "items": this(), "minItems": 1}), "[[null]]", "[]"),
        (node(null()), "{\"n\": {\"n\": null}}", "{}"),
        (list(null()), "[[null]]", "[]"),
        (json!({"properties": {"n": this()}, "required": ["n"]}), "{\"n\": 3}", "{}"),
        // With a finite alternative.
        (with(json!({"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}]})), "null", "{\"n\""),
        (
            with(
                json!({"type": "object", "properties": {"n": {"$ref": "#/$defs/c"}}, "additionalProperties": false}),
            ),
            "{}",
            "{\"n\"",
        ),
        (with(json!({"type": "array", "items": {"$ref": "#/$defs/d"}})), "[]", "[{"),
    ] {
        let grammar = compile(&compiler, schema(taken.clone())).await.unwrap();
        assert!(accepts(&grammar, text) && !accepts(&grammar, not), "{taken}");
        let mut progress = grammar.begin();
        let begun = not.bytes().all(|byte| {
            let allows = progress.mask().unwrap().allows(byte.into());
            allows && progress.step(byte.into()).is_ok()
        });
        assert!(!begun || taken.get("$defs").is_none(), "{taken}: {not} is begun");
    }
}

#[tokio::test]
async fn formats_and_references_of_common_programs_are_accepted() {
    let compiler = compiler();
    let ask = async |asked: Value| compile(&compiler, schema(asked)).await.unwrap();
    let host = |labels: usize| format!("\"{}a.de\"", "abcdefghi.".repeat(labels));
    for asked in [
        json!({"type": "string", "format": "hostname"}),
        json!({"type": "string", "format": "hostname", "maxLength": 5000}),
        json!({"format": "hostname"}),
    ] {
        let grammar = ask(asked.clone()).await;
        assert!(accepts(&grammar, &host(24)) && !accepts(&grammar, &host(25)), "{asked}");
    }
    let short = ask(json!({"type": "string", "format": "hostname", "maxLength": 6})).await;
    assert!(accepts(&short, "\"a.de\"") && !accepts(&short, "\"abcd.de\""));
    for format in ["int32", "int64", "uint32", "float", "double", "date"] {
        assert!(accepts(&ask(json!({"type": "integer", "format": format})).await, "12"));
    }
    for format in ["binary", "byte", "password"] {
        assert!(accepts(&ask(json!({"type": "string", "format": format})).await, "\"x y\""));
    }
    for name in ["Größe", "A B", "Box[int]", "a/b~c", "50%", "\"q\"", "<T>|{}^`\\#?"] {
        let pointer = name.replace('~', "~0").replace('/', "~1");
        let written = percent_encoding::utf8_percent_encode(&pointer, percent_encoding::NON_ALPHANUMERIC);
        for reference in [pointer.clone(), written.to_string()] {
            let asked = json!({"$ref": format!("#/$defs/{reference}"), "$defs": {name: {"type": "null"}}});
            assert!(accepts(&ask(asked).await, "null"), "{reference}");
        }
    }
}

#[tokio::test]
async fn faults_that_the_library_finds_are_readable() {
    let compiler = compiler();
    for (refused, word) in [
        (schema(json!({"type": "string", "pattern": "foo", "minLength": 100})), "/foo/"),
        (Source::regex("(?=a)b"), "(?=a)b: look-around"),
    ] {
        let message = compile(&compiler, refused).await.unwrap_err().message;
        assert!(message.contains(word), "{message}");
    }
    let small = json!({"type": "number", "exclusiveMaximum": -1.234_567_890_123_456_7e-50});
    assert!(accepts(&compile(&compiler, schema(small)).await.unwrap(), "-1"));
    // A dead end is no excess of work.
    let stuck = Source::lark("start: \"ab\" more\nmore: more".to_owned());
    let mut progress = compile(&compiler, stuck).await.unwrap().begin();
    let stuck = "ab".bytes().find_map(|byte| progress.step(byte.into()).and_then(|_| progress.mask()).err());
    assert_eq!(stuck, Some(GrammarError::NoToken));
}

#[tokio::test]
async fn grammars_cannot_name_end_tokens() {
    let compiler = compiler();
    let ask = async |token: &str| {
        let grammar = format!("// <end>\nstart: \"<end>x\" {token} \"abc\"");
        compile(&compiler, Source::lark(grammar)).await
    };
    for token in ["<end>", "<[256]>", "<[1,200-300]>", "<[^97]>", "<[*]>"] {
        let message = ask(token).await.unwrap_err().message;
        assert!(message.contains(token) && message.contains("ends the answer"), "{message}");
    }
    assert!(accepts(&ask("<[97,98]>").await.unwrap(), "<end>xaabc"));
}

#[tokio::test]
async fn regexes_choices_and_lark_are_enforced() {
    let compiler = compiler();
    let date = compile(&compiler, Source::regex(r"^\d{4}-\d\d$")).await.unwrap();
    assert!(accepts(&date, "2024-02") && !accepts(&date, "2024-2") && !accepts(&date, "2024-022"));
    let money = compile(&compiler, Source::regex(r"a/b\$")).await.unwrap();
    assert!(accepts(&money, "a/b$") && !accepts(&money, "a/b"));
    let choices = ["yes", "yes, \"sir\"\n", "nö"].map(str::to_owned).to_vec();
    let choice = compile(&compiler, Source::choice(choices.clone())).await.unwrap();
    assert!(choices.iter().all(|text| accepts(&choice, text)));
    assert!(!accepts(&choice, "no") && !accepts(&choice, "yes,"));
    let sums = "start: sum\nsum: /[0-9]+/ | sum \"+\" sum";
    let sums = compile(&compiler, Source::lark(sums.to_owned())).await.unwrap();
    assert!(accepts(&sums, "1+22+3") && !accepts(&sums, "1+"));
    // In literals, comments and repetitions, operator characters are no operators.
    let literals = "start: A B ~ 2 // a & b\nA: \"&~%json\" | /[&~]\\/&/\nB: \"b\"";
    let literals = compile(&compiler, Source::lark(literals.to_owned())).await;
    assert!(literals.is_ok_and(|grammar| accepts(&grammar, "&~%jsonbb") && accepts(&grammar, "~/&bb")));
    let deleted = compile(&compiler, Source::choice(vec!["a\u{7f}".to_owned()])).await.unwrap();
    assert!(accepts(&deleted, "a\u{7f}"));
    let compact =
        compile(&compiler, Source::json(Some(json!({"type": "array"})), Whitespace::Compact)).await.unwrap();
    assert!(accepts(&compact, "[1,2]") && !accepts(&compact, "[1, 2]"));
}

#[tokio::test]
async fn grammar_is_cached_until_it_fails() {
    let compiler = compiler();
    let ask = async || compile(&compiler, Source::regex("a+")).await.unwrap();
    let first = ask().await;
    assert_eq!(first, ask().await);
    // A token that the mask does not allow.
    first.begin().step(u32::from(b'b')).unwrap_err();
    assert_ne!(first, ask().await);
    assert!(accepts(&ask().await, "aa"));
}

/// Grammars that are still computed after their time limit: the number of threads is bounded, equal grammars share one,
/// and cached grammars are served. A grammar that is late because the machine is busy is cached in the end.
#[tokio::test(flavor = "multi_thread")]
async fn slow_grammars_use_a_bounded_number_of_threads() {
    /// Index of the one grammar, `a{1}`, that itself computes for a long time.
    const BUSY: usize = 1;
    let late = |number: usize| Source::regex(&format!("a{{{number}}}"));
    let mut compiler = compiler();
    let kept = compile(&compiler, Source::regex("a+")).await.unwrap();
    let open = Arc::new(OnceLock::new());
    let (gate, busy, work) = (open.clone(), late(BUSY).unwrap().cache_key(), compiler.work.clone());
    compiler.work = Arc::new(move |factory, source| {
        while source.cache_key() == busy && computed() <= TIME {
            std::hint::spin_loop();
        }
        gate.wait();
        work(factory, source)
    });
    let compiler = Arc::new(compiler);
    let all = BUSY..BUSY + THREADS + LATE;
    let waiting = all.clone().map(|number| {
        let compiler = compiler.clone();
        tokio::spawn(async move { compile(&compiler, late(number)).await })
    });
    for refused in waiting.collect::<Vec<_>>() {
        let error = refused.await.unwrap().unwrap_err();
        assert!(error.message.contains("cannot compile the grammar within"), "{error}");
    }
    let working = || Arc::strong_count(compiler.factory.get().unwrap()) - 1;
    assert_eq!(working(), THREADS + LATE);
    assert_eq!(compile(&compiler, Source::regex("a+")).await, Ok(kept));
    let error = compile(&compiler, Source::regex("b")).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::ResourceExhausted, "{error}");
    // Does not wait for a thread.
    assert_eq!(compile(&compiler, late(BUSY)).await.unwrap_err().code, ErrorCode::InvalidArgument);
    assert_eq!(working(), THREADS + LATE);
    open.set(()).unwrap();
    for number in all.skip(1) {
        let served = async {
            while compile(&compiler, late(number)).await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LONG, served).await.unwrap();
    }
    let error = compile(&compiler, late(BUSY)).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument, "would take as long again");
}

/// Each grammar is refused as invalid, or the work for each token is bounded.
#[tokio::test]
async fn hostile_grammars_are_refused_or_bounded() {
    let compiler = compiler();
    let numbered = |count: usize, value: fn(usize) -> Value| -> Map<String, Value> {
        (0..count).map(|index| (format!("p{index}"), value(index))).collect()
    };
    let texts = |count: usize| numbered(count, |_| json!({"type": "string"}));
    let nested = |depth: usize| {
        (0..depth).fold(json!({"type": "string"}), |inner, _| json!({"items": inner, "minItems": 1}))
    };
    let twice = |depth: usize| {
        let mut definitions = numbered(depth, |index| {
            let before = json!({"$ref": format!("#/$defs/p{}", index.saturating_sub(1))});
            json!({"allOf": [before, {"properties": {format!("y{index}"): before}}, before]})
        });
        definitions.insert("p0".to_owned(), json!({"type": "object", "properties": {"x": true}}));
        json!({"$ref": format!("#/$defs/p{}", depth - 1), "$defs": definitions})
    };
    let options: Vec<Value> = (0..151).map(|index| json!({"const": index})).collect();
    for (name, source) in [
        ("deep", schema(nested(60))),
        ("schemas", schema(json!({ "properties": texts(3000) }))),
        ("optional", schema(json!({ "properties": texts(301) }))),
        ("enum", schema(json!({"enum": (0..100_000).collect::<Vec<_>>()}))),
        ("literal", schema(json!({"const": "x".repeat(10_000)}))),
        ("options", schema(json!({ "anyOf": options }))),
        ("name patterns", schema(json!({ "patternProperties": texts(30) }))),
        ("endless", schema(json!({"$ref": "#"}))),
        ("circle", schema(json!({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}))),
        ("doubling", schema(twice(40))),
        ("long", schema(json!({"description": "x".repeat(1 << 20)}))),
        ("never", schema(json!({"type": "integer", "minimum": 2, "maximum": 1}))),
        ("backreference", Source::regex(r"(a)\1")),
        ("lookahead", Source::regex("(?=a)b")),
        ("no regex", Source::regex("(")),
        ("brackets", Source::regex(&("(".repeat(200) + &")".repeat(200)))),
        ("long regex", Source::regex(&"a".repeat(1 << 20))),
        // Work that the library does not bound.
        ("meet in allOf", schema(json!({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}))),
        (
            "meet beside a reference",
            schema(json!({
                "$defs": {"a": {"multipleOf": 9973}}, "$ref": "#/$defs/a", "multipleOf": 97,
            })),
        ),
        (
            "meet by name",
            schema(json!({
                "properties": {"a": {"multipleOf": 9973}}, "patternProperties": {"^a": {"multipleOf": 97}},
            })),
        ),
        ("meet with places", schema(json!({"allOf": [{"multipleOf": 0.0097}, {"multipleOf": 103}]}))),
        ("values in values", schema(json!({"enum": vec![json!({"a": [1, 2, 3]}); 1500]}))),
        ("a value of many", schema(json!({"const": vec![1; 6000]}))),
        (
            "patterns together",
            schema(json!({"allOf": vec![json!({"type": "string", "pattern": "a.*b"}); 5]})),
        ),
        (
            "divisors",
            schema(
                json!({"properties": numbered(30, |index| json!({"type": "integer", "multipleOf": 9973 - index}))}),
            ),
        ),
        ("all of many", schema(json!({"allOf": vec![json!({"pattern": "a.*b"}); 17]}))),
        ("long names", schema(json!({"$defs": {"~".repeat(3000): {"$defs": {"a": {}}}}}))),
        ("required twice", schema(json!({"properties": texts(302), "required": ["p0", "p0", "q"]}))),
        ("schema in Lark", Source::lark("start: %json {\"multipleOf\": 99989}".to_owned())),
        ("intersection", Source::lark("start: X\nX: /a*/ & /b*/".to_owned())),
        ("complement", Source::lark("start: X\nX: ~/a*/".to_owned())),
        ("no rules", Source::lark("start: nothing".to_owned())),
        ("itself", Source::lark("start: start".to_owned())),
        ("choices", Source::choice(vec!["x".to_owned(); 100_000])),
    ] {
        let error = compile(&compiler, source).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument, "{name}: {error}");
        assert!(error.message.len() < 500, "{name}: {error}");
    }
    for (name, source, text) in [
        ("catastrophic", Source::regex("(x+x+)+y"), "x".repeat(500)),
        ("repeated", Source::regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}"), "a".repeat(500)),
        ("ambiguous", Source::lark("start: a a a a a\na: b*\nb: \"x\"*".to_owned()), "x".repeat(500)),
        ("both sides", Source::lark("start: start start | \"a\"".to_owned()), "a".repeat(500)),
        ("deep", schema(nested(40)), "[".repeat(40)),
        ("tree", schema(json!({"items": {"$ref": "#"}})), "[".repeat(500)),
    ] {
        let mut progress = compile(&compiler, source).await.unwrap().begin();
        for byte in text.bytes() {
            // It may fail, but must not panic.
            let Ok(mask) = progress.mask() else { break };
            assert!(mask.allows(byte.into()), "{name}");
            if progress.step(byte.into()).is_err() {
                break;
            }
        }
    }
}
