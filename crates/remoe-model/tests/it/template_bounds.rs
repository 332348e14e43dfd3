//! Limits of single steps of a template, and loops compared with Jinja2 3.1.6.

#![cfg(feature = "text")]

use remoe_model::text::ChatTemplate;

/// Renders `source` without messages.
fn rendered(source: &str) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), source).unwrap();
    let template = ChatTemplate::open(folder.path()).unwrap().unwrap();
    template.render(&[], false).map_err(|error| error.to_string())
}

#[track_caller]
fn refused(source: &str, reason: &str) {
    let error = rendered(source).map(|text| text.len()).unwrap_err();
    assert!(error.contains(reason), "{source:.200}: {error}");
}

#[test]
fn containers_nested_too_deeply_are_refused() {
    let macros =
        "{% macro m(x, n) %}{% set x = [[[x]]] %}{% if n %}{{ m(x, n - 1) }}{% endif %}{% endmacro %}";
    refused(&format!("{macros}{{{{ m([], 90) }}}}"), "nested deeper than 200 levels");
    assert_eq!(rendered(&format!("{macros}{{{{ m([], 60) }}}}")).unwrap(), "");
    for step in [
        "[x]",
        "(x,)",
        "{'a': x}",
        "dict(a=x)",
        "{'a': x}.items()",
        "[x] | map('default')",
        "[x] | batch(1) | list",
        "[[1, x]] | groupby(0)",
        "cycler(x)",
        "joiner(x)",
        "[x].copy",
    ] {
        let source = format!("{{% set x = [] %}}{}", format!("{{% set x = {step} %}}").repeat(300));
        refused(&source, "nested deeper than 200 levels");
    }
}

#[test]
fn hashed_tuples_count_every_element() {
    let tuples = "{% set a = (0,) * 1000000 %}{% set b = (a,) * 30 %}";
    refused(&format!("{tuples}{{{{ b in {{}} }}}}"), "longer than");
    assert_eq!(rendered("{{ ((1, 'a'), 2) in {((1, 'a'), 2): 3} }}").unwrap(), "True");
}

#[test]
fn long_sets_and_affixes_are_counted() {
    let again = |setup: &str, step: &str| {
        format!("{{% set x = 'b' %}}{setup}{{% for i in range(9) %}}{{% set y = {step} %}}{{% endfor %}}")
    };
    let long = "{% set s = 'a' * 30000000 %}";
    for step in ["x.strip(s)", "x | trim(s)", "x.partition(s)"] {
        refused(&again(long, step), "bytes of texts");
    }
    let affixes = "{% set x = 'b' * 16000000 %}{% set s = ('a' * 16000000,) * 100 %}";
    for step in ["x.startswith(s)", "x.endswith(s)"] {
        refused(&again(affixes, step), "bytes of texts");
    }
    let stripped = "{{ 'abxyz'.strip('zyxwvutsrqponmlkjihgfedcba0123456789') }}|{{ 'éa!é'.strip('abcdefghijklmnopqrstuvwxyz0123456789é') }}";
    assert_eq!(rendered(stripped).unwrap(), "|!");
}

#[test]
fn escaped_arguments_are_counted_one_by_one() {
    refused("{% set t = '<' * 6000000 %}{{ ('%s' | safe) % ((t,) * 30) }}", "longer than");
    assert_eq!(rendered("{{ ('%s' | safe) % ('<&\\'\"a>',) }}").unwrap(), "&lt;&amp;&#39;&#34;a&gt;");
}

#[test]
fn messages_of_undefined_values_shorten_long_names() {
    for source in ["{{ {}['k' * 1000] + 1 }}", "{{ ({} | attr('k' * 1000)) + 1 }}"] {
        refused(source, "kkk…'");
    }
    refused("{{ {}[('k' * 1000,)] + 1 }}", "kkk…");
}

#[test]
fn calls_have_at_most_1024_arguments() {
    let count = "{% macro m() %}{{ varargs | length }}{% endmacro %}";
    assert_eq!(rendered(&format!("{count}{{{{ m(*range(1024)) }}}}")).unwrap(), "1024");
    refused(&format!("{count}{{{{ m(*range(1025)) }}}}"), "more than 1024 arguments");
    refused("{{ '%s' | format(*range(2000)) }}", "more than 1024 arguments");
}

#[test]
fn long_attribute_paths_are_refused() {
    for step in
        ["map(attribute=p)", "sort(attribute=p)", "unique(attribute=p)", "sum(attribute=p)", "groupby(p)"]
    {
        let source = format!("{{% set p = 'a.' * 3000 %}}{{{{ [{{}}] | {step} | list }}}}");
        refused(&source, "path of an attribute is longer than 4096 bytes");
    }
}

#[test]
fn unique_counts_its_items() {
    let source = "{% set l = [0] * 1000000 %}{% for i in range(12) %}{% set x = l | unique %}{% endfor %}";
    refused(source, "longer than");
}

#[test]
fn long_date_formats_are_refused() {
    refused("{{ strftime_now('%255d' * 400) }}", "the format is longer than 1024 bytes");
}

#[test]
fn rounding_beyond_127_bits_is_refused() {
    refused("{{ (2 ** 126 + (2 ** 126 - 1)) | round(-38) }}", "127 bits");
    let tens = "{{ (2 ** 126) | round(-38) }}";
    assert_eq!(rendered(tens).unwrap(), format!("1{}", "0".repeat(38)));
    let common = "{{ 5|round(-1) }}|{{ 15|round(-1) }}|{{ -15|round(-1) }}|{{ -16|round(-1) }}|{{ 149|round(-2) }}|{{ 26|round(-1) }}";
    assert_eq!(rendered(common).unwrap(), "0|20|-20|-20|100|30");
}

#[test]
fn loop_changed_refuses_loops() {
    for argument in ["loop", "1, loop", "[loop]", "loop.changed"] {
        let source = format!("{{% for x in [1, 2] %}}{{{{ loop.changed({argument}) }}}}{{% endfor %}}");
        refused(&source, "a loop cannot be put into");
    }
    let source = "{% for x in [1, 1, 2] %}{{ loop.changed(x, [x]) }}{% endfor %}";
    assert_eq!(rendered(source).unwrap(), "TrueFalseTrue");
}

#[test]
fn loop_else_runs_unless_a_body_reached_its_end() {
    for (source, expected) in [
        ("{% for x in [1,2] %}{% break %}{% else %}E{% endfor %}", "E"),
        ("{% for x in [1,2] %}{% continue %}{% else %}E{% endfor %}", "E"),
        ("{% for x in [1,2] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% else %}E{% endfor %}", "1"),
        ("{% for x in [1,2] %}{{ loop.index }}{% continue %}{% else %}E{% endfor %}", "12E"),
        ("{% for x in [] %}{{ x }}{% else %}E{% endfor %}", "E"),
        ("{% for x in [1,2] if x > 2 %}{{ x }}{% else %}E{% endfor %}", "E"),
    ] {
        assert_eq!(rendered(source).unwrap(), expected, "{source}");
    }
}

#[test]
fn loop_condition_is_evaluated_item_by_item() {
    let go = "{% set ns = namespace(go=true, n=0) %}";
    for (source, expected) in [
        ("{% for x in [1,2,3] if ns.go %}{{ x }}{% set ns.go = false %}{% endfor %}", "1"),
        ("{% for x in [1,2,3,4] if x > ns.n %}{{ x }}{% set ns.n = x + 1 %}{% endfor %}", "13"),
        ("{% for x in [2,1,0] if 2 / x %}{{ x }}{% if x == 1 %}{% break %}{% endif %}{% endfor %}", "21"),
        ("{% for x in [1,2,3] if x > 1 %}{{ loop.index }}/{{ loop.length }} {% endfor %}", "1/2 2/2 "),
    ] {
        assert_eq!(rendered(&format!("{go}{source}")).unwrap(), expected, "{source}");
    }
}

#[test]
fn digits_after_dots_are_items() {
    assert_eq!(
        rendered("{{ [[1,2],[3,4]].0.1 }}{{ [[[5]]].0.0.0 }}{{ 1.5 }}{{ 1e1 }}").unwrap(),
        "251.510.0"
    );
}

#[test]
fn joined_and_parsed_texts_are_counted() {
    let empty = "{% set l = [''] * 1000000 %}{% for i in range(20) %}{% set x = STEP %}{% endfor %}";
    for step in ["l | join", "''.join(l)"] {
        refused(&empty.replace("STEP", step), "longer than");
    }
    let digits = "{% set t = 'x' * 30000000 %}{% for i in range(50) %}{% set x = STEP %}{% endfor %}";
    for step in ["t | int", "t | float"] {
        refused(&digits.replace("STEP", step), "bytes of texts");
    }
}

#[test]
fn lines_are_split_as_in_python() {
    let source =
        r"{{ 'a\nb\r\nc\n' | indent(2) }}|{{ 'a\nb\r\nc\r'.splitlines() }}{{ '\r\n'.splitlines(true) }}";
    assert_eq!(rendered(source).unwrap(), "a\n  b\n  c\n|['a', 'b', 'c']['\\r\\n']");
}
