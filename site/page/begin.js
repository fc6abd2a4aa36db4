const wanted = readAddress();
makeKnobs();
beginWords();
beginOrder(wanted);
beginBreak();
beginPrefix(wanted);
beginVerify();
beginBoth();
beginWire(); // last: it plays
redrawWhen();
