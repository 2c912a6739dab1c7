"""The page's style sheet: light, dark and on paper, on wide and narrow screens."""

from __future__ import annotations

from haloc.report.style import COLOURS

_LIGHT = {
    "page": "#f5f6f8", "card": "#ffffff", "ink": "#1a2330", "dim": "#566273", "rule": "#dde2e9", "soft": "#edf0f4",
    "link": "#00598c", "yes": "#00714f", "yes-soft": "#e4f4ee", "no": "#b24400", "no-soft": "#fdeee4",
    "c0": COLOURS[0], "c1": COLOURS[1], "c2": COLOURS[2], "c3": COLOURS[3], "c4": COLOURS[4],
    "dense": "#8b95a3", "shut": "#c9cfd8", "was": "#8b95a3",
    "h0": "#1f6ea8", "h1": "#5b9cc9", "h2": "#9cc4e0", "h3": "#d3e5f1", "h4": "#eff1f4",
    "h5": "#fbe3d3", "h6": "#f4bd97", "h7": "#e58c52", "h8": "#c2591a",
    "h0t": "#fff", "h1t": "#0b1a28", "h2t": "#0b1a28", "h3t": "#0b1a28", "h4t": "#0b1a28",
    "h5t": "#2b1304", "h6t": "#2b1304", "h7t": "#2b1304", "h8t": "#fff",
}  # fmt: skip
_DARK = {
    "page": "#11151b", "card": "#191f27", "ink": "#e8ecf1", "dim": "#a5b0be", "rule": "#2e3743", "soft": "#222a34",
    "link": "#7cc0ee", "yes": "#4fd1a5", "yes-soft": "#12302a", "no": "#ff9d63", "no-soft": "#3a2417",
    "c0": "#4fa8e0", "c1": "#f08a4b", "c2": "#35c79b", "c3": "#e39ac5", "c4": "#f0b93f",
    "dense": "#8d98a7", "shut": "#4a5563", "was": "#76818f",
    "h0": "#7cc4f2", "h1": "#4796c9", "h2": "#2e6a93", "h3": "#24465e", "h4": "#2a323d",
    "h5": "#513322", "h6": "#83481f", "h7": "#bb6526", "h8": "#f39a5a",
    "h0t": "#0b1a28", "h1t": "#06121c", "h2t": "#fff", "h3t": "#fff", "h4t": "#fff",
    "h5t": "#fff", "h6t": "#fff", "h7t": "#1a0b02", "h8t": "#2b1304",
}  # fmt: skip

_BASE = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%;scroll-behavior:smooth;scroll-padding-top:1rem}
body{margin:0;background:var(--page);color:var(--ink);font:1rem/1.55 -apple-system,"Segoe UI",Roboto,
"Helvetica Neue","Noto Sans","Liberation Sans",Arial,system-ui,sans-serif;font-variant-numeric:tabular-nums;
overflow-wrap:anywhere}
main,header,footer{max-width:1160px;margin:0 auto;padding:0 20px}
h1,h2,h3,p,ul,ol,dl,figure{margin:0;padding:0}
h1{font-size:1.6rem;line-height:1.25;font-weight:650;letter-spacing:-.012em}
h2{font-size:1.28rem;line-height:1.3;font-weight:650;letter-spacing:-.008em}
h3{font-size:.95rem;line-height:1.35;font-weight:600}
code,pre,.code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;font-size:.92em}
small,.dim{color:var(--dim)}
small{font-size:.82rem}
a{color:var(--link);text-decoration:none}
a:hover{text-decoration:underline}
button{font:inherit;font-size:.85rem;color:var(--ink);background:var(--card);border:1px solid var(--rule);
border-radius:8px;padding:.25rem .75rem;cursor:pointer}
button:hover{border-color:var(--dim)}
[hidden]{display:none!important}
:focus-visible{outline:2px solid var(--c0);outline-offset:2px;border-radius:3px}
header{padding-top:34px;display:grid;grid-template-columns:1fr auto;gap:4px 16px;align-items:start}
header p{color:var(--dim);font-size:.92rem;grid-column:1/-1}
nav{grid-column:1/-1;display:flex;flex-wrap:wrap;gap:4px 16px;padding-top:10px;font-size:.9rem}
section{padding-top:44px}
section>h2{margin-bottom:4px}
.lead{color:var(--dim);max-width:76ch;margin-bottom:14px}
section>h2+:not(.lead){margin-top:12px}
footer{padding-top:48px;padding-bottom:40px;color:var(--dim);font-size:.85rem}
details{margin-top:16px}
summary{cursor:pointer;color:var(--link);font-size:.92rem;padding:4px 0}
"""
_VERDICT = """
#verdict{padding-top:24px}
.hero{background:var(--card);border:1px solid var(--rule);border-left:6px solid var(--dim);border-radius:12px;
padding:22px 26px}
.hero.met{border-left-color:var(--yes);background:linear-gradient(90deg,var(--yes-soft),var(--card) 60%)}
.hero.missed{border-left-color:var(--no);background:linear-gradient(90deg,var(--no-soft),var(--card) 60%)}
.hero h2{display:flex;align-items:center;gap:14px;font-size:2rem;letter-spacing:-.02em}
.sign{width:42px;height:42px;flex:none}
.sign circle{fill:var(--dim)}
.sign path{fill:none;stroke:var(--card);stroke-width:3.4;stroke-linecap:round;stroke-linejoin:round}
.met h2{color:var(--yes)}.met .sign circle{fill:var(--yes)}
.missed h2{color:var(--no)}.missed .sign circle{fill:var(--no)}
.big{font-size:1.18rem;line-height:1.45;margin-top:8px;text-wrap:pretty}
.big:empty{display:none}
.budgets{list-style:none;margin-top:10px;color:var(--dim);font-size:.95rem}
.budgets b{color:var(--ink)}
.yes,.budgets .yes{color:var(--yes)}.no,.budgets .no{color:var(--no)}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:16px;margin-top:16px}
.figures article{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:16px 18px 12px;
display:flex;flex-direction:column;break-inside:avoid}
.figures h3{color:var(--dim);font-weight:500}
.change{font-size:1.02rem;line-height:1.35;margin-top:2px}
.change b{font-size:1.5rem;font-weight:650;letter-spacing:-.015em;white-space:nowrap}
.saved{font-size:.9rem;color:var(--dim);min-height:1.5em}
.on{font-size:.8rem;color:var(--dim);margin-top:auto}
.bullet{width:100%;display:block;margin:6px 0 2px;max-width:420px}
.bullet text{font-size:12px;fill:var(--ink)}
.bullet .before{fill:var(--soft);stroke:var(--was);stroke-width:1}
.bullet .after{fill:var(--c0)}
.bullet .over .after{fill:var(--no)}
.bullet .whisker{stroke:var(--ink);stroke-width:1.4;fill:none}
.bullet .faded{stroke:var(--dim)}
.bullet .limit{stroke:var(--ink);stroke-width:2}
.notes{margin:16px 0 0;padding-left:1.2em;color:var(--dim);font-size:.92rem;max-width:90ch}
"""
_CHARTS = """
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:16px 18px;break-inside:avoid;
container-type:inline-size;min-width:0}
.card figcaption p{color:var(--dim);font-size:.85rem}
.chart{width:100%;max-width:640px;height:auto;display:block;margin:8px auto 4px;overflow:visible}
.chart text{font-size:13px;fill:var(--dim)}
.chart .title{fill:var(--ink)}
.end{text-anchor:end}.mid{text-anchor:middle}
.chart .strong{fill:var(--ink);font-weight:650}
.halo{paint-order:stroke;stroke:var(--card);stroke-width:5px;stroke-linejoin:round}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--dim);stroke-width:1}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}
.dot{fill:var(--c);stroke:var(--card);stroke-width:1.2}
.error{stroke:var(--c);stroke-width:1.6}
.faint .dot{opacity:0}.faint:hover .dot,.faint:focus .dot{opacity:1}
.hit{fill:transparent}
.ring{fill:none;stroke:var(--ink);stroke-width:2.2;pointer-events:none}
.level{stroke-width:1.6;stroke-dasharray:6 4}
.dense .level{stroke:var(--dim)}.budget .level{stroke:var(--no)}
.chart .budget text{fill:var(--no)}
.identity{stroke:var(--dim);stroke-width:1.4;stroke-dasharray:2 4}
.m{cursor:default;outline-offset:1px}
.m:hover .dot,.m:focus .dot{stroke:var(--ink);stroke-width:2}
.m:hover .is,.m:focus .is,.m:hover .after,.m:focus .after{filter:brightness(1.15)}
.cell rect{fill:var(--h)}.cell text{fill:var(--t);font-weight:500}
.cell.chosen rect{stroke:var(--ink);stroke-width:4}
.cell:hover rect,.cell:focus rect{stroke:var(--dim);stroke-width:2}
.cell.chosen:hover rect{stroke:var(--ink);stroke-width:4}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 18px;align-items:center;font-size:.85rem;color:var(--dim);
margin:4px 0}
p.legend{gap:3px;flex-wrap:nowrap;white-space:nowrap}
.legend li{display:flex;align-items:center;gap:6px}
.key{width:15px;height:15px;flex:none}
.swatch{flex:0 1 18px;height:14px;border-radius:3px;background:var(--h);border:1px solid var(--rule)}
.s0{--c:var(--c0)}.s1{--c:var(--c1)}.s2{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}.s5{--c:var(--dense)}
.f-tucker2{--c:var(--c0)}.f-spatial{--c:var(--c1)}.f-svd{--c:var(--c2)}.f-narrow{--c:var(--c3)}.f-dense{--c:var(--dense)}
.f-shut{--c:var(--shut)}.f-was{--c:var(--was)}
@container (max-width:430px){.chart text{font-size:17px}.chart .halo{stroke-width:6px}}
"""
_NETWORK = """
.totals{display:grid;grid-template-columns:auto 1fr auto;gap:6px 12px;align-items:center;background:var(--card);
border:1px solid var(--rule);border-radius:12px;padding:14px 18px;margin-bottom:10px;font-size:.92rem}
.totals .bar{height:26px}
.totals .f-was .is{fill:var(--soft);stroke:var(--was);stroke-width:1;vector-effect:non-scaling-stroke}
.bar{width:100%;height:18px;display:block;overflow:visible}
.bar .was{fill:var(--soft);stroke:var(--was);stroke-width:1;vector-effect:non-scaling-stroke}
.bar .is{fill:var(--c)}
.net{list-style:none;background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:8px 18px;
margin-top:8px}
.net li{display:grid;grid-template-columns:minmax(0,15em) minmax(0,13em) minmax(0,1fr) 9.5em 3.4em;gap:0 14px;
align-items:center;padding:4px 0;border-bottom:1px solid var(--rule);font-size:.88rem;line-height:1.35;
break-inside:avoid}
.net li:last-child{border-bottom:0}
.who code{font-weight:600}
.who small{display:block;font-size:.8rem}
.cost,.share{text-align:right;white-space:nowrap}
.share{color:var(--dim)}
.why{grid-column:3/-1;color:var(--dim);font-size:.82rem;padding-top:1px}
.shut .who,.shut .what,.shut .cost{color:var(--dim)}
.net.stages li{grid-template-columns:minmax(0,9em) minmax(0,1fr) minmax(0,18em)}
.stages .cost{text-align:left;white-space:normal}
.tall{max-height:80vh;overflow-y:auto;border-radius:12px}
@media screen and (max-width:760px){
.net{padding:8px 14px}
.net li{grid-template-columns:minmax(0,1fr) auto;gap:2px 10px;padding:8px 0}
.net .who{grid-column:1/-1}.net .bar{grid-column:1/-1;order:5}.net .share{display:none}
.net .what{grid-column:1}.why{grid-column:1/-1;order:6}
.net.stages li{grid-template-columns:minmax(0,1fr) auto}
.stages .who{grid-column:1}}
"""
_TABLES = """
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:12px;min-width:0;
align-self:start}
table{border-collapse:collapse;width:100%;font-size:.88rem;overflow-wrap:normal}
caption{caption-side:bottom;text-align:left;color:var(--dim);font-size:.82rem;padding:8px 14px}
th,td{padding:7px 14px;text-align:left;vertical-align:top;white-space:nowrap;border-top:1px solid var(--rule)}
thead th{border-top:0;color:var(--dim);font-weight:600;font-size:.82rem;vertical-align:bottom}
tbody th{font-weight:600}
td.num,th.num{text-align:right}
td small,th small{display:block;font-weight:400}
td.words{white-space:normal;min-width:19em}
.sortable td.words{min-width:34em}
.micro{display:inline-block;min-width:5.6em;padding-bottom:3px;
background:linear-gradient(var(--c0),var(--c0)) left bottom/var(--w) 3px no-repeat,
linear-gradient(var(--soft),var(--soft)) left bottom/100% 3px no-repeat}
.form{display:inline-flex;align-items:center;gap:6px}
th button{border:0;background:none;padding:0;font:inherit;color:inherit;border-radius:3px}
th button::after{content:"↕";opacity:.4;padding-left:4px}
th[aria-sort] button{color:var(--ink)}
th[aria-sort=ascending] button::after{content:"↑";opacity:1}
th[aria-sort=descending] button::after{content:"↓";opacity:1}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,160px),1fr));gap:10px 24px;font-size:.9rem;
margin-top:6px}
.facts dt{color:var(--dim);font-size:.82rem}.facts dd{margin:0}
.copied{position:relative;margin-bottom:18px}
.copied button{position:absolute;right:0;top:-4px}
pre{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:14px 18px;margin:8px 0 0;
overflow-x:auto;line-height:1.5;overflow-wrap:normal}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--page);border-radius:8px;
padding:6px 10px;font-size:.82rem;line-height:1.4;white-space:pre-line;max-width:min(300px,92vw)}
@media screen and (max-width:560px){
th,td{padding:7px}
main,header,footer{padding-left:14px;padding-right:14px}
header{padding-top:20px}h1{font-size:1.3rem}.hero{padding:16px 18px}.hero h2{font-size:1.6rem}
.sign{width:34px;height:34px}.big{font-size:1.05rem}.card{padding:14px}.change b{font-size:1.35rem}
section{padding-top:36px}}
"""
_PAPER = """
@media print{
@page{margin:14mm}
html{font-size:12px}body{background:#fff}
main,header,footer{max-width:none;padding:0}
nav,header button,.copied button,#tip,.sortable .words{display:none!important}
th button::after{content:none}
section{padding-top:20pt}
h2,h3,figcaption,.lead{break-after:avoid}
tr{break-inside:avoid}
.wide,.tall,pre{overflow:visible;max-height:none}
pre{white-space:pre-wrap}
table{font-size:.74rem}th,td{padding:3pt 4pt;white-space:normal}thead th,small{font-size:.74rem}
.code,td.num,.form{white-space:nowrap}.bullet text{font-size:15px}.chart text{font-size:15px}
td.words,.sortable td.words{min-width:0}
.figures{grid-template-columns:repeat(3,1fr);gap:8pt}.cards{grid-template-columns:repeat(2,1fr);gap:8pt}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def style_sheet() -> str:
    """The whole style sheet; paper is always light."""
    heat = "".join(f".h{n}{{--h:var(--h{n});--t:var(--h{n}t)}}" for n in range(9))
    themes = [
        _root(":root", _LIGHT),
        f"@media (prefers-color-scheme:dark){{{_root(':root:not([data-theme=light])', _DARK)}}}",
        _root(":root[data-theme=dark]", _DARK),
        f"@media print{{{_root(':root,:root[data-theme],:root:not([data-theme=light])', _LIGHT)}}}",
        ":root[data-theme=light]{color-scheme:light}:root[data-theme=dark]{color-scheme:dark}",
    ]
    return "".join([*themes, _BASE, _VERDICT, _CHARTS, _NETWORK, _TABLES, heat, _PAPER])


def _root(selector: str, colours: dict[str, str]) -> str:
    return f"{selector}{{{''.join(f'--{name}:{value};' for name, value in colours.items())}}}"
