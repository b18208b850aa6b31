// How the search ranks what it finds: as Sphinx does, with records of decisions below the pages that people look for.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score]) => (page.startsWith("adr/") ? score - 20 : score),
};
