//! Parser of templates as Jinja2's `parser.py`: statements here, expressions in `expressions.rs`.

use std::sync::Arc;

use super::ast::{Expr, ExprKind, ForLoop, Macro, Parameter, Stmt, Target, Template};
use super::error::Error;
use super::lexer::{Token, tokenize};

/// Most tokens of a tag, as a chain of operators is evaluated by recursion.
const MAX_TAG_TOKENS: usize = 1024;
/// Deepest nesting of statements and expressions.
const MAX_NESTING: usize = 100;

pub(super) struct Parser {
    tokens: Vec<(Token, u32)>,
    position: usize,
    pub(super) nesting: usize,
    macros: Vec<Macro>,
    /// Implicit variables that each macro being parsed reads, innermost last.
    macro_reads: Vec<Vec<Arc<str>>>,
}

/// Parses a template.
///
/// # Errors
/// The syntax is invalid, or a tag is too long or nested too deeply.
pub(in crate::text) fn parse(source: &str) -> Result<Template, Error> {
    let tokens = tokenize(source)?;
    let mut length = 0;
    for (token, line) in &tokens {
        length = if matches!(token, Token::Data(_) | Token::VariableBegin | Token::BlockBegin) {
            0
        } else {
            length + 1
        };
        if length > MAX_TAG_TOKENS {
            return Err(Error::at(format!("a tag with more than {MAX_TAG_TOKENS} tokens"), *line));
        }
    }
    let mut parser = Parser { tokens, position: 0, nesting: 0, macros: Vec::new(), macro_reads: Vec::new() };
    let body = parser.statements(&[])?;
    match parser.current() {
        None => Ok(Template { body, macros: parser.macros }),
        Some(_) => parser.fail("unexpected end tag"),
    }
}

impl Parser {
    pub(super) fn current(&self) -> Option<&Token> {
        self.tokens.get(self.position).map(|(token, _)| token)
    }

    pub(super) fn line(&self) -> u32 {
        self.tokens.get(self.position).or(self.tokens.last()).map_or(1, |(_, line)| *line)
    }

    pub(super) fn fail<T>(&self, message: impl Into<String>) -> Result<T, Error> {
        Err(Error::at(message, self.line()))
    }

    pub(super) fn next(&mut self) -> Option<Token> {
        let token = self.current().cloned();
        self.position += 1;
        token
    }

    pub(super) fn at(&self, operator: &str) -> bool {
        matches!(self.current(), Some(Token::Operator(found)) if *found == operator)
    }

    pub(super) fn at_name(&self, name: &str) -> bool {
        matches!(self.current(), Some(Token::Name(found)) if **found == *name)
    }

    /// Reports if the token after the current one is this name.
    pub(super) fn next_is_name(&self, name: &str) -> bool {
        matches!(self.tokens.get(self.position + 1), Some((Token::Name(found), _)) if **found == *name)
    }

    pub(super) fn next_is(&self, operator: &str) -> bool {
        matches!(self.tokens.get(self.position + 1), Some((Token::Operator(found), _)) if *found == operator)
    }

    pub(super) fn skip(&mut self, operator: &str) -> bool {
        let is = self.at(operator);
        self.position += usize::from(is);
        is
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let is = self.at_name(name);
        self.position += usize::from(is);
        is
    }

    pub(super) fn expect(&mut self, operator: &str) -> Result<(), Error> {
        if self.skip(operator) { Ok(()) } else { self.fail(format!("expected '{operator}'")) }
    }

    fn expect_token(&mut self, token: &Token, described: &str) -> Result<(), Error> {
        if self.current() == Some(token) {
            self.position += 1;
            Ok(())
        } else {
            self.fail(format!("expected {described}"))
        }
    }

    pub(super) fn name(&mut self) -> Result<Arc<str>, Error> {
        match self.current() {
            Some(Token::Name(name)) => {
                let name = name.clone();
                self.position += 1;
                Ok(name)
            }
            _ => self.fail("expected a name"),
        }
    }

    /// Records that the enclosing macros read `name`, if it is an implicit variable.
    pub(super) fn record_read(&mut self, name: &Arc<str>) {
        for names in &mut self.macro_reads {
            if matches!(&**name, "varargs" | "kwargs" | "caller") {
                names.push(name.clone());
            }
        }
    }

    /// Parses one level deeper.
    ///
    /// # Errors
    /// The nesting is too deep, or `parse` fails.
    pub(super) fn nested<T>(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if self.nesting == MAX_NESTING {
            return self
                .fail(format!("statements or expressions are nested deeper than {MAX_NESTING} levels"));
        }
        self.nesting += 1;
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    /// Parses statements up to a tag that begins with one of `ends`, and stops at that name.
    fn statements(&mut self, ends: &[&str]) -> Result<Vec<Stmt>, Error> {
        let mut body = Vec::new();
        loop {
            match self.current() {
                None if ends.is_empty() => return Ok(body),
                None => return self.fail(format!("expected a tag '{}'", ends.join("' or '"))),
                Some(Token::Data(text)) => {
                    body.push(Stmt::Text(text.clone()));
                    self.position += 1;
                }
                Some(Token::VariableBegin) => {
                    self.position += 1;
                    body.push(Stmt::Output(self.tuple(true, &[], false)?));
                    self.expect_token(&Token::VariableEnd, "end of print statement")?;
                }
                Some(Token::BlockBegin) => {
                    self.position += 1;
                    if ends.iter().any(|end| self.at_name(end)) {
                        return Ok(body);
                    }
                    let statement = self.nested(Self::statement)?;
                    body.push(statement);
                    self.expect_token(&Token::BlockEnd, "end of statement block")?;
                }
                Some(_) => return self.fail("unexpected token between tags"),
            }
        }
    }

    /// Parses the end of a tag, then statements up to a tag that begins with one of `ends`; returns the
    /// statements and that name.
    fn body(&mut self, ends: &[&str]) -> Result<(Vec<Stmt>, Arc<str>), Error> {
        // Jinja2 allows a colon before the end of a tag.
        self.skip(":");
        self.expect_token(&Token::BlockEnd, "end of statement block")?;
        let body = self.statements(ends)?;
        Ok((body, self.name()?))
    }

    fn statement(&mut self) -> Result<Stmt, Error> {
        let line = self.line();
        let name = self.name()?;
        match &*name {
            "for" => self.for_loop(),
            "if" => self.condition(),
            "set" => self.set(),
            "macro" => {
                let name = self.name()?;
                let parameters = self.signature()?;
                let number = self.macro_body(name, parameters, "endmacro")?;
                Ok(Stmt::Macro(number))
            }
            "call" => {
                let parameters = if self.at("(") { self.signature()? } else { Vec::new() };
                let call = self.expression()?;
                if !matches!(call.kind, ExprKind::Call(..)) {
                    return self.fail("expected call");
                }
                let number = self.macro_body("caller".into(), parameters, "endcall")?;
                Ok(Stmt::CallBlock(call, number))
            }
            "filter" => {
                let filter = self.filters(None, true)?;
                let (body, _) = self.body(&["endfilter"])?;
                Ok(Stmt::Filter(filter, body))
            }
            "with" => self.with(),
            "block" => {
                let name = self.name()?;
                for word in ["scoped", "required"] {
                    self.skip_name(word);
                }
                let (body, _) = self.body(&["endblock"])?;
                self.skip_name(&name);
                Ok(Stmt::Block(body))
            }
            "print" => {
                let mut values = vec![self.expression()?];
                while self.skip(",") {
                    values.push(self.expression()?);
                }
                Ok(Stmt::Output(Expr { line, kind: ExprKind::Concat(values) }))
            }
            "generation" => {
                let (body, _) = self.body(&["endgeneration"])?;
                Ok(Stmt::Generation(body))
            }
            "break" => Ok(Stmt::Break),
            "continue" => Ok(Stmt::Continue),
            "include" => self.unavailable("include", line),
            "import" | "from" => self.unavailable("import", line),
            "extends" => self.unavailable("extends", line),
            other => Err(Error::at(format!("encountered unknown tag '{other}'"), line)),
        }
    }

    fn unavailable(&mut self, tag: &'static str, line: u32) -> Result<Stmt, Error> {
        while !matches!(self.current(), None | Some(Token::BlockEnd)) {
            self.position += 1;
        }
        Ok(Stmt::Unavailable(tag, line))
    }

    fn for_loop(&mut self) -> Result<Stmt, Error> {
        let target = self.target(&["in"], false)?;
        if target.sets("loop") {
            return self.fail("can't assign to special loop variable in for-loop target");
        }
        if !self.skip_name("in") {
            return self.fail("expected 'in'");
        }
        let iter = self.tuple(false, &["recursive"], false)?;
        let test = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let recursive = self.skip_name("recursive");
        let start = self.position;
        let (body, end) = self.body(&["endfor", "else"])?;
        let tokens = self.tokens.get(start..self.position).unwrap_or_default();
        let reads_loop = recursive
            || tokens.iter().any(|(token, _)| matches!(token, Token::Name(name) if **name == *"loop"));
        let otherwise = if &*end == "else" { self.body(&["endfor"])?.0 } else { Vec::new() };
        Ok(Stmt::For(Box::new(ForLoop { target, iter, test, recursive, reads_loop, body, otherwise })))
    }

    fn condition(&mut self) -> Result<Stmt, Error> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(false, &[], false)?;
            let (body, end) = self.body(&["elif", "else", "endif"])?;
            branches.push((test, body));
            match &*end {
                "elif" => (),
                "else" => return Ok(Stmt::If(branches, self.body(&["endif"])?.0)),
                _ => return Ok(Stmt::If(branches, Vec::new())),
            }
        }
    }

    fn set(&mut self) -> Result<Stmt, Error> {
        let target = self.target(&[], true)?;
        if self.skip("=") {
            return Ok(Stmt::Set(target, self.tuple(true, &[], false)?));
        }
        let filter = if self.at("|") { Some(self.filters(None, false)?) } else { None };
        let (body, _) = self.body(&["endset"])?;
        Ok(Stmt::SetBlock(target, filter, body))
    }

    fn with(&mut self) -> Result<Stmt, Error> {
        let mut values = Vec::new();
        while !matches!(self.current(), None | Some(Token::BlockEnd)) {
            if !values.is_empty() {
                self.expect(",")?;
            }
            let target = self.target(&[], false)?;
            self.expect("=")?;
            values.push((target, self.expression()?));
        }
        let (body, _) = self.body(&["endwith"])?;
        Ok(Stmt::With(values, body))
    }

    /// Parses the target of an assignment: a name, several with commas, or an attribute of a namespace if
    /// `namespace`.
    fn target(&mut self, ends: &[&str], namespace: bool) -> Result<Target, Error> {
        let mut targets = Vec::new();
        let mut tuple = false;
        loop {
            let ended = matches!(self.current(), None | Some(Token::BlockEnd | Token::Operator(")" | "=")))
                || ends.iter().any(|end| self.at_name(end));
            if ended && !targets.is_empty() {
                break;
            }
            targets.push(self.nested(|parser| parser.simple_target(namespace))?);
            if !self.skip(",") {
                break;
            }
            tuple = true;
        }
        match targets.pop() {
            Some(only) if !tuple => Ok(only),
            last => {
                targets.extend(last);
                Ok(Target::Tuple(targets))
            }
        }
    }

    fn simple_target(&mut self, namespace: bool) -> Result<Target, Error> {
        if self.skip("(") {
            let target = self.target(&[], namespace)?;
            self.expect(")")?;
            return Ok(target);
        }
        let name = self.name()?;
        if namespace && self.skip(".") {
            return Ok(Target::Attribute(name, self.name()?));
        }
        if ["true", "True", "false", "False", "none", "None"].contains(&&*name) {
            return self.fail(format!("can't assign to '{name}'"));
        }
        Ok(Target::Name(name))
    }

    fn signature(&mut self) -> Result<Vec<Parameter>, Error> {
        self.expect("(")?;
        let mut parameters: Vec<Parameter> = Vec::new();
        while !self.at(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
            }
            let name = self.name()?;
            let default = if self.skip("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.iter().any(|(_, default)| default.is_some()) {
                return self.fail("non-default argument follows default argument");
            }
            parameters.push((name, default));
        }
        self.expect(")")?;
        Ok(parameters)
    }

    fn macro_body(&mut self, name: Arc<str>, parameters: Vec<Parameter>, end: &str) -> Result<usize, Error> {
        self.macro_reads.push(Vec::new());
        let (body, _) = self.body(&[end])?;
        let read = self.macro_reads.pop().unwrap_or_default();
        let reads = |name: &str| {
            read.iter().any(|read| **read == *name)
                && !parameters.iter().any(|(parameter, _)| **parameter == *name)
        };
        let (varargs, kwargs, caller) = (reads("varargs"), reads("kwargs"), reads("caller"));
        self.macros.push(Macro { name, parameters, body, varargs, kwargs, caller });
        Ok(self.macros.len() - 1)
    }
}
