package document

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// said reads a document and returns its problems without the file's name.
func said(data string, read func(Node)) (out []string) {
	for _, p := range Read("f", []byte(data), read) {
		out = append(out, strings.TrimPrefix(p.Error(), "f:"))
	}
	return out
}

func TestRead(t *testing.T) {
	for _, c := range []struct{ data, want string }{
		{"a: 1\n", ""},
		{"", "1:1: the file is empty"},
		{"\n# nothing\n\n", "1:1: the file is empty"},
		{"a: 1\n--- \nb: 2\n", "2:1: a second document begins here: put it into a file of its own"},
		{"a: 1\nb: é\x80\n", "2:5: there is a byte that is no text: write the file in UTF-8"},
		{"a: 1\r\rb: \x1b", "3:4: there is a byte that is no text: write the file in UTF-8"},
		{"a: [1\n", "1:1: it is no YAML: did not find expected ',' or ']'"},
		{"a: 1\n b: 2\n", "2:1: it is no YAML: mapping values are not allowed in this context"},
		{"a: *b\n", "1:1: it is no YAML: unknown anchor 'b' referenced"},
		{"\xff\xfea\x00", "1:1: there is a byte that is no text: write the file in UTF-8"},
	} {
		called := false
		if got := strings.Join(said(c.data, func(Node) { called = true }), "\n"); got != c.want || called && strings.Contains(c.want, "no YAML") {
			t.Errorf("%q: got %s\nwant %s", c.data, got, c.want)
		}
	}
}

// Problems come in the order of the file, in whichever order they were found.
func TestReadSorts(t *testing.T) {
	got := said("a: 1\nb: 2\nc: 3\n", func(n Node) {
		fields, _ := n.Fields("a", "b", "c", "d")
		for _, name := range []string{"c", "d", "a", "b"} {
			fields[name].Warn("%s", name)
		}
	})
	if want := []string{"1:1: warning: d: d", "1:4: warning: a: a", "2:4: warning: b: b", "3:4: warning: c: c"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// What each reader gives for a value, and what it says of it.
func TestScalars(t *testing.T) {
	duration := func(n Node) string { return n.Duration(time.Minute, time.Second, time.Hour).String() }
	number := func(n Node) string { return fmt.Sprint(n.Int(3, 0, 9)) }
	flag := func(n Node) string { return fmt.Sprint(n.Bool(true)) }
	word := func(n Node) string { return n.OneOf("pod", "pod", "workload") }
	text := func(n Node) string { return n.Text("a text") }
	for _, c := range []struct {
		read              func(Node) string
		value, want, says string
	}{
		{duration, "", "1m0s", ""}, // missing
		{duration, "90s", "1m30s", ""},
		{duration, "~", "1m0s", "it has no value: write one, or leave the field out"},
		{duration, "5", "5s", `"5" has no unit: write 5s`},
		{duration, "0", "1s", "0 is too short: write 1s to 1h"},
		{duration, "99999", "1h0m0s", `"99999" has no unit: write 1h`},
		{duration, "-5s", "1s", "-5s is too short: write 1s to 1h"},
		{duration, "2h", "1h0m0s", "2h is too long: write 1s to 1h"},
		{duration, "1.0001s", "1s", "1.0001s is finer than a millisecond: write 1s"},
		{duration, "soon", "1m0s", `"soon" is no duration: write one like 90s, 2m or 1h30m`},
		{duration, "{a: 1}", "1m0s", "it is a mapping: write one value"},
		{number, "", "3", ""},
		{number, "9", "9", ""},
		{number, "10", "3", `"10" is no number from 0 to 9: write one`},
		{number, "1.5", "3", `"1.5" is no number from 0 to 9: write one`},
		{flag, "", "true", ""},
		{flag, "false", "false", ""},
		{flag, "no", "true", `"no" is unknown: write one of true, false`},
		{word, "", "pod", ""},
		{word, "Pods", "pod", `"Pods" is unknown: write pod`},
		{word, "workoad", "pod", `"workoad" is unknown: write workload`},
		{word, "gpu", "pod", `"gpu" is unknown: write one of pod, workload`},
		{text, "", "", "it is missing: write a text"},
		{text, "' '", "", "it is empty: write a text"},
		{text, "' a '", "a", ""},
		{text, "[a]", "", "it is a list: write one value"},
	} {
		file := "x: 1\n"
		if c.value != "" {
			file += "v: " + c.value + "\n"
		}
		got := ""
		says := said(file, func(n Node) {
			fields, ok := n.Fields("x", "v")
			if !ok {
				t.Fatal(file)
			}
			got = c.read(fields["v"])
		})
		place := "2:4: v: "
		if c.value == "" {
			place = "1:1: v: "
		}
		if got != c.want || c.says == "" && len(says) > 0 || c.says != "" && !slices.Equal(says, []string{place + c.says}) {
			t.Errorf("%q: got %s %q\nwant %s %q", c.value, got, says, c.want, c.says)
		}
	}
}

func TestListsAndMappings(t *testing.T) {
	read := func(n Node) {
		fields, _ := n.Fields("list", "map", "none", "empty", "wrong", "alias")
		for _, v := range fields["list"].Items() {
			v.Fail("%s", v.Text(""))
		}
		names, values := fields["map"].Entries()
		for i, v := range values {
			v.Fail("%s", names[i]+v.Text(""))
		}
		fields["none"].Items()
		fields["none"].Entries()
		fields["none"].AtLeastOne("one")
		fields["empty"].Items()
		fields["empty"].AtLeastOne("one")
		fields["wrong"].Items()
		fields["wrong"].Entries()
		fields["alias"].Fail("%v", fields["alias"].Text(""))
	}
	got := said("list: [a, &b b]\nmap: {c: d, e: f, c: g}\nempty: []\nwrong: h\nalias: *b\n", read)
	want := []string{"1:1: none: it is missing: write one", "1:8: list[0]: a", "1:11: list[1]: b", "2:10: map.c: cd", "2:16: map.e: ef", "2:19: map.c: it is there twice: leave one out",
		"3:8: empty: it is empty: write one", `4:8: wrong: it is "h": write a list`, `4:8: wrong: it is "h": write a mapping`, "5:8: alias: b"}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestVerbatim(t *testing.T) {
	for value, want := range map[string]bool{"é rate(a)": true, "'rate(a)'": false, "|\n  rate(a)": false, "rate(a)\n  / b": false, "": false} {
		said("é: x\nv: "+value+"\n", func(n Node) {
			fields, _ := n.Fields("é", "v")
			if got := fields["v"].Verbatim(); got != want {
				t.Errorf("%q: %v", value, got)
			}
		})
	}
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "0s", time.Second: "1s", 10 * time.Second: "10s", time.Minute: "1m", 10 * time.Minute: "10m", 75 * time.Second: "1m15s",
		time.Hour: "1h", 20 * time.Hour: "20h", time.Hour + time.Second: "1h0m1s", -time.Hour: "-1h", 1500 * time.Millisecond: "1.5s", 90 * time.Minute: "1h30m"} {
		got := Short(d)
		if back, err := time.ParseDuration(got); got != want || err != nil || back != d {
			t.Errorf("%s: %s, want %s", d, got, want)
		}
	}
}
