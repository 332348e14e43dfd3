//! Renders a parsed template: statements, scopes and calls of macros.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::access::cut;
use super::ast::{Expr, For, Macro, Stmt, Target, Template};
use super::calls::Given;
use super::error::{Error, fail};
use super::limits::Limits;
use super::objects::{Loop, Object};
use super::print;
use super::value::{Items, Map, Value};

/// One rendering.
pub(super) struct Machine<'t> {
    template: &'t Template,
    pub(super) limits: Limits,
    scopes: Vec<Scope>,
    scope: usize,
    /// Macros that were made: their scopes have to stay.
    captures: usize,
    /// Texts that are being written, innermost last.
    out: Vec<String>,
    /// Recursive loops that have begun, with the scopes around them.
    recursive: Vec<(&'t For, usize)>,
}

#[derive(Default)]
struct Scope {
    names: HashMap<Arc<str>, Value>,
    parent: Option<usize>,
}

/// How a statement ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// Renders `template` with the variables of `context`.
///
/// # Errors
/// It fails, raises, or takes more than a rendering may.
pub(super) fn render(template: &Template, context: HashMap<Arc<str>, Value>) -> Result<String, Error> {
    let mut machine = Machine {
        template,
        limits: Limits::default(),
        scopes: vec![Scope { names: context, parent: None }],
        scope: 0,
        captures: 0,
        out: vec![String::new()],
        recursive: Vec::new(),
    };
    machine.statements(&template.body)?;
    Ok(machine.out.pop().unwrap_or_default())
}

impl<'t> Machine<'t> {
    pub(super) fn lookup(&self, name: &Arc<str>) -> Value {
        let mut scope = Some(self.scope);
        while let Some(found) = scope.and_then(|number| self.scopes.get(number)) {
            if let Some(value) = found.names.get(name) {
                return value.clone();
            }
            scope = found.parent;
        }
        super::calls::global(name)
            .unwrap_or_else(|| Value::undefined(format!("'{}' is undefined", cut(name))))
    }

    fn store(&mut self, name: &Arc<str>, value: Value) {
        if let Some(scope) = self.scopes.get_mut(self.scope) {
            scope.names.insert(name.clone(), value);
        }
    }

    /// Evaluates in a new scope below `parent`.
    fn scoped<T>(
        &mut self,
        parent: usize,
        evaluate: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (before, length, captures) = (self.scope, self.scopes.len(), self.captures);
        self.scopes.push(Scope { names: HashMap::new(), parent: Some(parent) });
        self.scope = length;
        let result = evaluate(self);
        self.scope = before;
        if self.captures == captures {
            self.scopes.truncate(length);
        }
        result
    }

    /// The text that `evaluate` writes.
    fn captured(&mut self, evaluate: impl FnOnce(&mut Self) -> Result<Flow, Error>) -> Result<String, Error> {
        self.out.push(String::new());
        let result = evaluate(self);
        let text = self.out.pop().unwrap_or_default();
        result.map(|_| text)
    }

    fn write(&mut self, text: &str) -> Result<(), Error> {
        self.limits.write(text.len())?;
        if let Some(out) = self.out.last_mut() {
            out.push_str(text);
        }
        Ok(())
    }

    fn write_value(&mut self, value: &Value) -> Result<(), Error> {
        match value {
            Value::Text(text) => self.write(text),
            other => {
                let text = print::text(&mut self.limits, other)?;
                self.write(&text)
            }
        }
    }

    fn statements(&mut self, body: &'t [Stmt]) -> Result<Flow, Error> {
        for statement in body {
            let flow = self.statement(statement)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &'t Stmt) -> Result<Flow, Error> {
        self.limits.step()?;
        match statement {
            Stmt::Text(text) => self.write(text)?,
            Stmt::Output(expr) => {
                let value = self.evaluate(expr)?;
                self.write_value(&value).map_err(|error| error.in_line(expr.line))?;
            }
            Stmt::If(branches, otherwise) => {
                for (test, body) in branches {
                    if self.evaluate(test)?.truth() {
                        return self.statements(body);
                    }
                }
                return self.statements(otherwise);
            }
            Stmt::For(statement) => {
                let items = self.evaluate(&statement.iter)?;
                let scope = self.scope;
                return self.run_loop(statement, &items, scope, 0);
            }
            Stmt::Set(target, expr) => {
                let value = self.evaluate_marked(expr)?;
                self.assign(target, value).map_err(|error| error.in_line(expr.line))?;
            }
            Stmt::SetBlock(target, filter, body) => {
                let scope = self.scope;
                let text =
                    self.captured(|machine| machine.scoped(scope, |machine| machine.statements(body)))?;
                self.limits.build(text.len())?;
                let mut value = Value::Text(text.into());
                if let Some(filter) = filter {
                    value = self.evaluate_filters(filter, value)?;
                }
                self.assign(target, value)?;
            }
            Stmt::Macro(number) => {
                let value = self.make_macro(*number)?;
                if let Some(definition) = self.template.macros.get(*number) {
                    self.store(&definition.name, value);
                }
            }
            Stmt::CallBlock(call, number) => {
                let caller = self.make_macro(*number)?;
                let value = self.evaluate_call(call, Some(caller))?;
                self.write_value(&value).map_err(|error| error.in_line(call.line))?;
            }
            Stmt::Filter(filter, body) => {
                let scope = self.scope;
                let text =
                    self.captured(|machine| machine.scoped(scope, |machine| machine.statements(body)))?;
                self.limits.build(text.len())?;
                let value = self.evaluate_filters(filter, Value::Text(text.into()))?;
                self.write_value(&value).map_err(|error| error.in_line(filter.line))?;
            }
            Stmt::With(values, body) => {
                let mut evaluated = Vec::new();
                for (target, expr) in values {
                    evaluated.push((target, self.evaluate(expr)?));
                }
                return self.scoped(self.scope, |machine| {
                    for (target, value) in evaluated {
                        machine.assign(target, value)?;
                    }
                    machine.statements(body)
                });
            }
            Stmt::Block(body) => return self.scoped(0, |machine| machine.statements(body)),
            Stmt::Generation(body) => return self.scoped(self.scope, |machine| machine.statements(body)),
            Stmt::Break => return Ok(Flow::Break),
            Stmt::Continue => return Ok(Flow::Continue),
            Stmt::Unavailable(tag, line) => {
                return Err(Error::at(
                    format!("'{tag}' needs other templates, of which there are none"),
                    *line,
                ));
            }
        }
        Ok(Flow::Next)
    }

    fn assign(&mut self, target: &Target, value: Value) -> Result<(), Error> {
        match target {
            Target::Name(name) => self.store(name, value),
            Target::Tuple(targets) => {
                let items = self.iterate(&value).map_err(|_| {
                    Error::new(format!("cannot unpack non-iterable {} object", value.type_name()))
                })?;
                if items.len() != targets.len() {
                    return fail(format!("expected {} values to unpack, got {}", targets.len(), items.len()));
                }
                for (target, item) in targets.iter().zip(&*items) {
                    self.assign(target, item.clone())?;
                }
            }
            Target::Attribute(name, attribute) => {
                self.limits.keep(&value, 1)?;
                match self.lookup(name) {
                    Value::Object(object) => match &*object {
                        Object::Namespace(values) => {
                            set_attribute(&mut values.borrow_mut(), attribute, value)?
                        }
                        _ => return fail("cannot assign attribute on non-namespace object"),
                    },
                    _ => return fail("cannot assign attribute on non-namespace object"),
                }
            }
        }
        Ok(())
    }

    /// Runs a loop over the items of a value, in scopes below `parent`.
    fn run_loop(
        &mut self,
        statement: &'t For,
        value: &Value,
        parent: usize,
        depth: usize,
    ) -> Result<Flow, Error> {
        let mut items = self.iterate(value).map_err(|error| error.in_line(statement.iter.line))?;
        // Jinja2 tests an item when its turn comes. `loop` knows how many items there are.
        let mut late = None;
        match &statement.test {
            Some(test) if statement.names_loop => {
                let mut kept = Vec::new();
                for item in &*items {
                    if self.passes(statement, test, item, parent)? {
                        kept.push(item.clone());
                    }
                }
                items = Rc::new(Items::new(kept));
            }
            test => late = test.as_ref(),
        }
        let recursive = statement.recursive.then(|| {
            self.recursive.push((statement, parent));
            self.recursive.len() - 1
        });
        let state = Object::Loop(Loop {
            items: items.clone(),
            index: Cell::new(0),
            depth,
            recursive,
            changed: RefCell::new(None),
        });
        let state = Rc::new(state);
        let name: Arc<str> = "loop".into();
        let mut completed = false;
        for (index, item) in items.iter().enumerate() {
            if let Some(test) = late
                && !self.passes(statement, test, item, parent)?
            {
                continue;
            }
            self.limits.step()?;
            if let Object::Loop(state) = &*state {
                state.index.set(index);
            }
            let flow = self.scoped(parent, |machine| {
                machine.store(&name, Value::Object(state.clone()));
                machine
                    .assign(&statement.target, item.clone())
                    .map_err(|error| error.in_line(statement.iter.line))?;
                machine.statements(&statement.body)
            })?;
            match flow {
                Flow::Next => completed = true,
                Flow::Continue => (),
                Flow::Break => break,
            }
        }
        if let Some(number) = recursive {
            self.recursive.truncate(number);
        }
        if !completed {
            // Jinja2 runs `else` unless one body came to its end, also after `break` and `continue`. As the body, it has variables of its own.
            return self.scoped(parent, |machine| machine.statements(&statement.otherwise));
        }
        Ok(Flow::Next)
    }

    /// Evaluates the `if` of a loop for one item.
    fn passes(
        &mut self,
        statement: &'t For,
        test: &'t Expr,
        item: &Value,
        parent: usize,
    ) -> Result<bool, Error> {
        self.limits.step()?;
        let passes = self.scoped(parent, |machine| {
            machine.assign(&statement.target, item.clone())?;
            machine.evaluate(test)
        })?;
        Ok(passes.truth())
    }

    /// `loop(items)` of a recursive loop.
    pub(super) fn call_loop(&mut self, state: &Loop, items: &Value) -> Result<Value, Error> {
        let Some((statement, parent)) =
            state.recursive.and_then(|number| self.recursive.get(number).copied())
        else {
            return fail("The loop must have the 'recursive' marker to be called recursively.");
        };
        self.limits.enter()?;
        let before = std::mem::replace(&mut self.scope, parent);
        let text = self.captured(|machine| machine.run_loop(statement, items, parent, state.depth + 1));
        self.scope = before;
        self.limits.leave();
        let text = text?;
        self.limits.build(text.len())?;
        Ok(Value::Text(text.into()))
    }

    fn make_macro(&mut self, number: usize) -> Result<Value, Error> {
        let Some(definition) = self.template.macros.get(number) else {
            return fail("unknown macro");
        };
        self.captures += 1;
        Ok(Value::object(Object::Macro(number, self.scope, definition.name.clone())))
    }

    /// Calls a macro.
    pub(super) fn call_macro(&mut self, number: usize, scope: usize, given: Given) -> Result<Value, Error> {
        let Some(definition) = self.template.macros.get(number) else {
            return fail("unknown macro");
        };
        self.limits.enter()?;
        let before = std::mem::replace(&mut self.scope, scope);
        let text = self.captured(|machine| {
            machine.scoped(scope, |machine| {
                machine.bind(definition, given)?;
                machine.statements(&definition.body)
            })
        });
        self.scope = before;
        self.limits.leave();
        let text = text?;
        self.limits.build(text.len())?;
        Ok(Value::Text(text.into()))
    }

    /// Puts arguments where a macro's body finds them.
    fn bind(&mut self, definition: &'t Macro, given: Given) -> Result<(), Error> {
        let Given { positional, mut named } = given;
        let name = &definition.name;
        self.limits.build_list(positional.len() + named.len() + definition.parameters.len())?;
        let mut take = |wanted: &str| {
            let place = named.iter().position(|(name, _)| **name == *wanted)?;
            Some(named.remove(place).1)
        };
        let more = positional.get(definition.parameters.len()..).unwrap_or_default().to_vec();
        let mut missing: Vec<(&Arc<str>, Option<&Expr>)> = Vec::new();
        let mut values = positional.into_iter();
        let mut bound = Vec::new();
        for (parameter, default) in &definition.parameters {
            match values.next().or_else(|| take(parameter)) {
                Some(value) => bound.push((parameter, value)),
                None => missing.push((parameter, default.as_ref())),
            }
        }
        if definition.caller {
            let caller = take("caller").filter(|caller| !matches!(caller, Value::None));
            self.store(&"caller".into(), caller.unwrap_or_else(|| Value::undefined("No caller defined")));
        }
        if definition.kwargs {
            let mut map = Map::default();
            for (name, value) in named {
                map.insert_text(&name, value);
            }
            self.store(&"kwargs".into(), Value::map(map));
        } else if let Some((unknown, _)) = named.first() {
            return fail(format!("macro '{name}' takes no keyword argument '{unknown}'"));
        }
        if definition.varargs {
            self.store(&"varargs".into(), Value::tuple(more));
        } else if !more.is_empty() {
            let most = definition.parameters.len();
            return fail(format!("macro '{name}' takes not more than {most} argument(s)"));
        }
        for (parameter, value) in bound {
            self.store(parameter, value);
        }
        // A default can read the parameters before it.
        for (parameter, default) in missing {
            let value = match default {
                Some(default) => self.evaluate(default)?,
                None => Value::undefined(format!("parameter '{}' was not provided", cut(parameter))),
            };
            self.store(parameter, value);
        }
        Ok(())
    }
}

/// Sets an attribute of a namespace.
pub(super) fn set_attribute(values: &mut Map, name: &str, value: Value) -> Result<(), Error> {
    if name.starts_with('_') {
        return fail(format!("a namespace cannot have the attribute '{name}': it begins with an underscore"));
    }
    values.insert_text(name, value);
    Ok(())
}
